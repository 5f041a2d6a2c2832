"""Attending to blocks where they lie gives what fetching them gives, over the set reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from stories import SCALE, Story, check_step, prefilled, small

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.attention.places import ATTEND_WHERE
from tierstore.errors import ConfigError, PolicyError
from tierstore.hardware import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Ids, Selection
    from tierstore.kernels.element import Array

TIGHT = {"fast": "4MiB", "dram": "8MiB", "budget": 0.25, "window": 1.0}
STACKS: dict[str, dict[str, Any]] = {
    "fast over dram": TIGHT,
    "with a disk": TIGHT | {"dram": "600KiB", "disk": "kv"},
    "with a coded disk": TIGHT | {"dram": "600KiB", "disk": "kv", "disk_codec": "raw"},
}


@pytest.mark.parametrize("where", ATTEND_WHERE)
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("preset", ["kvdrive", "exact"])
def test_a_step_attends_to_the_reported_tokens_wherever_they_lie(
    preset: str, stack: dict[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    story = Story(small(), sequences=2)
    engine = prefilled(preset, story, 700, attend_where=where, **stack)
    for _ in range(6):
        check_step(engine, story, 2e-5)
    engine.close()


def run(where: str, hardware: str, steps: int = 5) -> tuple[list[torch.Tensor], SparseAttention]:
    story = Story(small(), sequences=1, seed=3)
    engine = prefilled("exact", story, 600, attend_where=where, hardware=PRESETS[hardware], **TIGHT)
    outs = []
    for _ in range(steps):
        outs += [
            engine.attend(layer, *story.tell(layer, 1), scale=SCALE)
            for layer in range(story.geometry.layers)
        ]
    return outs, engine


def test_all_rules_give_the_same_outputs() -> None:
    runs = {where: run(where, "l20") for where in ATTEND_WHERE}
    for outs, engine in runs.values():
        for one, other in zip(outs, runs["fetch"][0], strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)
        engine.close()


def test_what_stays_is_not_moved() -> None:
    moved = {}
    for where in ("fetch", "in-tier"):
        _, engine = run(where, "reference")
        report = engine.report()
        moved[where] = report.fetched_bytes
        assert report.tiers[1].hits > 0
        engine.close()
    assert moved["in-tier"] == 0 < moved["fetch"]


def test_the_rates_decide_where_auto_attends() -> None:
    _, near = run("auto", "reference")
    assert near.report().fetched_bytes == 0
    near.close()


def test_without_a_memory_tier_below_everything_is_fetched(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = prefilled(
        "exact",
        story,
        600,
        attend_where="in-tier",
        fast="4MiB",
        window=1.0,
        disk=tmp_path / "kv",
        budget=0.25,
    )
    check_step(engine, story, 2e-5)
    assert engine.report().fetched_bytes > 0
    engine.close()


@pytest.mark.parametrize(
    "options", [{"attend_where": "there"}, {"attend_where": "auto", "recalibrate": 8}]
)
def test_rules_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attend_where="):
        SparseAttention(small(), fast="1MiB", dram="1MiB", **options)


def test_a_block_selected_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(small(), sequences=1)
    engine = prefilled("exact", story, 600, attend_where="in-tier", **TIGHT)
    assert engine._running.batch is not None
    index = engine._running.batch.layers[0].index
    select = index.select

    def twice(query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        selection = select(query, budgets, beside)
        selection.ids = selection.ids.copy()
        selection.ids[1] = selection.ids[0]
        return selection

    monkeypatch.setattr(index, "select", twice)
    with pytest.raises(PolicyError, match="distinct"):
        engine.attend(0, *story.tell(0, 1), scale=SCALE)
    engine.close()
