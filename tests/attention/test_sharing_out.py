"""Plans, their recalibration, and hysteresis, in the engine and on a model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tiny_models import llama, random_ids

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS, Preset
from tierstore.adapters.transformers import attach
from tierstore.errors import ConfigError
from tierstore.indexers import ExactIndex
from tierstore.policies import LRU, BlockStats
from tierstore.policies.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import BlockScores, Ids, Selection
    from tierstore.kernels.element import Array
    from tierstore.policies.ranked import Rank

LAYERS, HEADS = 2, 2
GEOMETRY = Geometry(LAYERS, 4, HEADS, 16, torch.float32, torch.device("cpu"))
TOKENS = 468
"""100 blocks of 4 tokens, with 4 sinks and a local window of 64 tokens."""

BUDGET = 48
"""Tokens: 12 blocks."""

WINDOWS = np.array([[1.5, 2.5], [3.0, 1.0]])
BUDGETS = np.array([[0.5, 1.5], [1.25, 0.75]])


class Watch:
    """Writes down what the index selects."""

    def __init__(self) -> None:
        self.counts: dict[int, list[int]] = {}
        self.scores: BlockScores | None = None

    def listen(self, layer: int, blocks: Ids, selection: Selection) -> None:
        self.counts[layer] = np.diff(selection.row_ptr).tolist()
        self.scores = selection.everything


class Run:
    """An engine with random queries and keys that change slowly; equal seeds, equal runs."""

    def __init__(self, preset: str | Preset = "kvdrive", seed: int = 0, **options: object) -> None:
        defaults: dict[str, object] = {"budget": BUDGET, "fast": "4MiB", "dram": "4MiB"}
        self.engine = SparseAttention(GEOMETRY, preset=preset, **(defaults | options))  # type: ignore[arg-type]
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """A prompt in an engine that holds nothing."""
        self.random = torch.Generator().manual_seed(seed)
        self.drift = torch.randn(LAYERS, 1, 4, 1, 16, generator=self.random)
        for layer in range(LAYERS):
            key, value = self._tokens(TOKENS), self._tokens(TOKENS)
            query = torch.randn(1, 4, TOKENS, 16, generator=self.random)
            self.engine.attend(layer, query, key, value, scale=0.25)

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randn(1, HEADS, count, 16, generator=self.random)

    def steps(self, count: int) -> list[torch.Tensor]:
        out = []
        for _ in range(count):
            noise = torch.randn(self.drift.shape, generator=self.random)
            self.drift = 0.9 * self.drift + 0.44 * noise
            for layer in range(LAYERS):
                key, value = self._tokens(1), self._tokens(1)
                out.append(self.engine.attend(layer, self.drift[layer], key, value, scale=0.25))
        return out

    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.engine.plan

    def held(self) -> np.ndarray:
        """Blocks in the fast tier, [layers, heads]."""
        segments = np.arange(LAYERS * HEADS, dtype=np.int32)
        return np.diff(self.engine.store.residents(segments).row_ptr).reshape(LAYERS, HEADS)

    def close(self) -> None:
        self.engine.store.validate()
        self.engine.close()


def test_a_plan_gives_each_head_its_window_and_its_budget(tmp_path: Path) -> None:
    plan = Plan(WINDOWS, 4, 16, BUDGETS, facts={"model": "random"})
    plan.save(tmp_path / "plan.json")
    watch = Watch()
    run = Run(plan=tmp_path / "plan.json", on_selection=watch.listen)
    run.steps(20)
    assert watch.counts == {0: [6, 18], 1: [15, 9]}
    assert run.held().tolist() == [[18, 30], [36, 12]]
    assert run.engine.plan is not None
    np.testing.assert_array_equal(run.engine.plan.windows, WINDOWS)
    assert run.engine.report().window == pytest.approx(2.0)
    run.close()


def test_a_plan_that_is_even_changes_nothing() -> None:
    even = Plan(np.full((LAYERS, HEADS), 2.0), 4, 16, np.ones((LAYERS, HEADS)))
    with_plan, without = Run(plan=even), Run()
    for ours, theirs in zip(with_plan.steps(30), without.steps(30), strict=True):
        assert torch.equal(ours, theirs)
    assert with_plan.engine.report() == without.engine.report()
    with_plan.close()
    without.close()


def test_a_tight_limit_shrinks_all_windows_alike() -> None:
    plan = Plan(np.array([[1.0, 3.0], [2.0, 2.0]]), 4, 16)
    run = Run(plan=plan, fast="88KiB")
    run.steps(5)
    held = run.held()
    assert held.sum() < 96, "the limit must be too tight for this test"
    assert held[0, 1] > held[1, 0] > held[0, 0] > 1
    run.close()


def test_sequences_share_a_plan() -> None:
    model = llama()
    plan = Plan(np.array([[1.0, 3.0]] * 3), 4, 16)
    ids = random_ids(2, 300)
    with torch.no_grad(), attach(model, budget=32, fast="4MiB", dram="4MiB", plan=plan) as cache:
        model(input_ids=ids[:, :-1], **cache.kwargs, use_cache=True)
        model(input_ids=ids[:, -1:], **cache.kwargs, use_cache=True)
        engine = cache._session.engine
        assert isinstance(engine, SparseAttention)
        store = engine.store
        segments = np.arange(12, dtype=np.int32)
        assert np.diff(store.residents(segments).row_ptr).tolist() == [8, 24] * 6


def test_recalibration_moves_windows_to_the_heads_that_miss(tmp_path: Path) -> None:
    """Head 0 of each layer asks the same all the time, head 1 always something new."""
    run = Run("exact", recalibrate=32)
    assert run.plan() is None
    still = run.drift.clone()
    for _ in range(60):
        run.drift[:, :, 2:] = torch.randn(LAYERS, 1, 2, 1, 16, generator=run.random)
        run.drift[:, :, :2] = still[:, :, :2]
        for layer in range(LAYERS):
            key, value = run._tokens(1), run._tokens(1)
            run.engine.attend(layer, run.drift[layer], key, value, scale=0.25)
    plan = run.plan()
    assert plan is not None
    assert (plan.windows[:, 0] < 2).all()
    assert (plan.windows[:, 1] > 2).all()
    assert plan.window == pytest.approx(2.0, abs=0.26)
    assert plan.facts["recalibrated_after"] == 32
    np.testing.assert_array_equal(run.held(), np.ceil(plan.windows * 12))
    plan.save(tmp_path / "live.json")
    again = Run("exact", plan=tmp_path / "live.json")
    again.steps(3)
    again.close()
    run.close()


def test_recalibration_keeps_budgets_and_survives_a_new_order_of_sequences() -> None:
    plan = Plan(WINDOWS, 4, 16, BUDGETS)
    run = Run(plan=plan, recalibrate=16)
    run.steps(10)
    run.engine.select_rows([0, 0])
    run.engine.select_rows([1])
    run.steps(40)
    found = run.engine.plan
    assert found is not None
    assert found is not plan
    np.testing.assert_array_equal(found.shares, BUDGETS)
    assert found.window <= 2.0
    run.close()


@pytest.mark.parametrize(
    ("windows", "budgets"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]),
        ([[1 / 3, 5 / 3], [1, 1]], [[1 / 3, 5 / 3], [1, 1]]),
        ([[1, 1], [1, 1]], None),
    ],
    ids=["less than a budget", "no whole 1/1024", "just the budget"],
)
def test_recalibration_goes_on_from_any_plan(
    windows: list[list[float]], budgets: list[list[float]] | None
) -> None:
    shares = None if budgets is None else np.array(budgets)
    run = Run(plan=Plan(np.array(windows, np.float64), 4, 16, shares), recalibrate=8)
    run.steps(12)
    found = run.plan()
    assert found is not None
    assert found.facts["recalibrated_after"] == 8
    np.testing.assert_allclose(found.windows, windows, atol=1 / 1024)
    run.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"plan": Plan(np.full((3, 2), 2.0), 4, 16)}, "3 layers, 2 KV heads"),
        ({"plan": Plan(np.full((2, 2), 2.0), 8, 16)}, "8 query heads"),
        ({"plan": Plan(np.full((2, 2), 2.0), 4, 16), "window": 3.0}, "the plan is for a window"),
        ({"plan": Plan(np.full((2, 2), 2.0), 4, 16), "fast": None}, "no fast tier"),
        ({"plan": "nowhere.json"}, "No such file"),
        ({"recalibrate": 0}, "recalibrate=0"),
        ({"recalibrate": 8, "fast": None}, "no fast tier"),
        ({"hysteresis": -1}, "hysteresis=-1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Run(**options)  # type: ignore[arg-type]


def test_no_difference_is_bit_equal_to_no_hysteresis() -> None:
    off, zero = Run(), Run(hysteresis=0.0)
    for ours, theirs in zip(off.steps(40), zero.steps(40), strict=True):
        assert torch.equal(ours, theirs)
    assert off.engine.report() == zero.engine.report()
    assert off.engine.report().filtered_bytes == 0
    off.close()
    zero.close()


@pytest.mark.parametrize("residents", [False, True])
def test_hysteresis_fetches_less_and_attends_to_the_whole_window(residents: bool) -> None:
    preset = replace(PRESETS["exact"], attends_residents=residents)
    off, on = Run(preset), Run(preset, hysteresis=0.5, record=True)
    off.steps(40)
    on.steps(40)
    report = on.engine.report()
    assert report.filtered_bytes > 0
    assert report.fetched_bytes < 0.8 * off.engine.report().fetched_bytes
    assert on.engine.report().selected_blocks == off.engine.report().selected_blocks
    for positions in on.engine.attended(1):
        strip = 4 + 64 + 40 % 32
        assert len(set(positions)) == len(positions) == strip + 4 * 24
    assert "not fetched" in str(report)
    off.close()
    on.close()


def test_without_a_window_hysteresis_attends_to_the_selected_that_are_there(
    tmp_path: Path,
) -> None:
    """DRAM is then a plain cache: what is in it and was not selected is left out."""
    run = Run("exact", fast=None, dram="380KiB", disk=tmp_path, hysteresis=1.0, record=True)
    run.steps(40)
    report = run.engine.report()
    assert report.window is None
    assert 0 < report.fetched_bytes < report.filtered_bytes
    for positions in run.engine.attended(1):
        assert 4 + 64 + 40 % 32 < len(positions) <= 4 + 64 + 40 % 32 + BUDGET
    run.close()


def test_a_steered_difference_follows_its_target() -> None:
    target = 2 << 10
    run = Run(replace(PRESETS["kvdrive"], hysteresis=f"{target}B"), seed=4)
    run.steps(60)
    before = run.engine.report().fetched_bytes
    run.steps(60)
    report = run.engine.report()
    assert 0.5 * target < (report.fetched_bytes - before) / 60 < 1.5 * target
    assert report.hysteresis > 0
    run.close()


@pytest.mark.parametrize("options", [{"hysteresis": "1KiB"}, {"recalibrate": 16}])
def test_after_a_reset_a_run_is_as_the_first(options: dict[str, object]) -> None:
    """What was steered, learnt and shared out is forgotten, too."""
    run = Run(**options)  # type: ignore[arg-type]
    first, report = run.steps(35), run.engine.report()
    assert report.hysteresis > 0 or run.plan() is not None
    run.engine.reset()
    assert run.engine.report().hysteresis == 0
    assert run.plan() is None
    run.begin(0)
    for ours, theirs in zip(run.steps(35), first, strict=True):
        assert torch.equal(ours, theirs)
    assert run.engine.report().fetched_bytes == report.fetched_bytes
    assert run.engine.report().hysteresis == report.hysteresis
    run.close()


def test_no_published_preset_leaves_anything_out() -> None:
    assert {preset.hysteresis for preset in PRESETS.values()} == {0.0}
    with pytest.raises(ConfigError, match="hysteresis='much'"):
        replace(PRESETS["kvdrive"], hysteresis="much")


@pytest.mark.parametrize("amount", [1.0, "1KiB"])
def test_an_index_without_scores_cannot_be_filtered(amount: float | str) -> None:
    for preset in ("full", replace(PRESETS["full"], name="own", hysteresis=amount)):
        given = {"hysteresis": amount} if preset == "full" else {}
        with pytest.raises(ConfigError, match="gives no scores to compare"):
            SparseAttention(GEOMETRY, preset=preset, fast="4MiB", dram="4MiB", **given)  # type: ignore[arg-type]
    run = Run("full", hysteresis=0.0)
    run.steps(1)
    run.close()


class ScoresOfTheSelected(ExactIndex):
    """Says nothing of the blocks that it leaves out."""

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        return replace(super().select(query, budgets, beside), everything=None)


class OldestOfAll(LRU):
    """Looks at no scores, not even where blocks were used in the same step."""

    def tie(self, stats: BlockStats) -> Rank:
        return stats.handles


def test_scores_of_what_is_selected_are_enough_to_filter() -> None:
    """With a policy that looks at none."""
    all_scores = replace(PRESETS["exact"], policy=OldestOfAll, hysteresis=0.5)
    whole, few = Run(all_scores), Run(replace(all_scores, index=ScoresOfTheSelected))
    for ours, theirs in zip(few.steps(30), whole.steps(30), strict=True):
        assert torch.equal(ours, theirs)
    assert few.engine.report().filtered_bytes > 0
    assert few.engine.report() == whole.engine.report()
    few.close()
    whole.close()


def test_the_report_can_be_written_as_json() -> None:
    run = Run(hysteresis="64KiB")
    run.steps(2)
    data = json.loads(json.dumps(run.engine.report().to_dict()))
    assert {"fetched_bytes", "filtered_bytes", "hysteresis"} <= set(data)
    run.close()
