"""Tuning: what is chosen from given times, and a run on a small sample."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.attention.planning import micro_batch_for, tuned
from tierstore.adapters.planner.stages import Times
from tierstore.adapters.planner.tuning import (
    TOKENS_PER_CENTROID,
    Sample,
    Trial,
    Tuner,
    balanced,
    best_centroids,
    fastest,
)
from tierstore.adapters.presets import PRESETS
from tierstore.errors import ConfigError
from tierstore.indexers import HierarchicalIndex
from tierstore.policies.plan import Plan, Tuning
from tierstore.policies.windows import WINDOWS, allocate_windows, pinned_below
from tierstore.timeline import Timeline

GEOMETRY = Geometry(1, 4, 2, 16, torch.float32, torch.device("cpu"))


def trial(setting: float, seconds: float, found: float = 1.0, **times: float) -> Trial:
    stages = {"select": 1.0, "judge": 1.0, "fetch": 1.0, "attend": 1.0, "missed": 0.1} | times
    return Trial(setting, Times(**stages), seconds, found)


def test_centroids_are_the_fastest_that_find_nearly_the_most() -> None:
    trials = [trial(8, 5, 0.9), trial(12, 4, 0.89), trial(15, 3, 0.8), trial(24, 1, 0.5)]
    assert best_centroids(trials).setting == 12


def test_the_window_grows_until_judging_takes_as_long_as_fetching() -> None:
    trials = [trial(1, 9, fetch=5.0), trial(2, 8, fetch=2.0), trial(3, 7, fetch=0.5),
              trial(4, 6, fetch=0.1)]  # fmt: skip
    assert balanced(trials).setting == 3
    # A disk that no window makes fast enough: the fastest then.
    assert balanced(trials[:2]).setting == 2


def test_of_equals_the_first_is_fastest() -> None:
    assert fastest([trial(1, 2), trial(2, 1), trial(4, 1)]).setting == 2


def test_no_window_is_tried_beyond_the_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(tuner: Tuner, preset: object, window: float, sequences: int) -> tuple[Times, None]:
        return Times(1.0, 1.0, 3 / window, 1.0, 0.1), None

    monkeypatch.setattr(Tuner, "_run", times)
    tuner = Tuner(GEOMETRY, PRESETS["exact"], [sample()], budget=60, scale=0.25)
    assert [each.setting for each in tuner.windows()] == [1.0, 1.5, 2.0, 3.0]


def sample(tokens: int = 600, steps: int = 12) -> Sample:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, tokens, 16, generator=generator) for _ in range(2))
    queries = torch.randn(steps, 2, 2, 16, generator=generator)
    return Sample(key, value, queries, torch.randn(2, 2, 4, 16, generator=generator))


def test_a_tuner_tries_all_and_chooses_among_them() -> None:
    said: list[str] = []
    tuner = Tuner(GEOMETRY, PRESETS["kvdrive"], [sample()], budget=60, scale=0.25, say=said.append)
    found = tuner.tune(batch=4)
    tried = found.trials
    assert [each.setting for each in tried["tokens per centroid"]] == list(TOKENS_PER_CENTROID)
    assert found.tokens_per_centroid in TOKENS_PER_CENTROID
    assert all(0 < (each.found or 0) <= 1 for each in tried["tokens per centroid"])
    assert found.window in {each.setting for each in tried["window"]}
    assert [each.setting for each in tried["micro-batch"]] == [1, 2, 4]
    assert found.micro_batch in {1, 2, 4}
    assert len(said) == sum(map(len, tried.values()))


def test_more_centroids_find_more_attention() -> None:
    tuner = Tuner(GEOMETRY, PRESETS["kvdrive"], [sample()], budget=60, scale=0.25)
    found = [each.found or 0 for each in tuner.centroids()]
    assert found[0] > found[-1]


def test_an_index_without_clusters_and_a_given_window_are_left_alone() -> None:
    tuner = Tuner(GEOMETRY, PRESETS["exact"], [sample()], budget=60, scale=0.25)
    found = tuner.tune(batch=1, window=2.5)
    assert found.tokens_per_centroid is None
    assert found.window == 2.5
    assert list(found.trials) == ["micro-batch"]


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        Tuner(GEOMETRY, PRESETS["exact"], [], budget=60, scale=0.25)


def test_a_plan_gives_the_index_its_clusters() -> None:
    plan = Plan(np.full((1, 2), 2.0), 4, 16, tuning=Tuning(24.0, 2))
    index = tuned(PRESETS["kvdrive"], plan).index
    assert isinstance(index, partial)
    assert index.func is HierarchicalIndex
    assert index.keywords == {"tokens_per_centroid": 24.0}
    assert tuned(PRESETS["exact"], plan) is PRESETS["exact"]
    assert tuned(PRESETS["kvdrive"], None) is PRESETS["kvdrive"]


def test_micro_batches_are_as_given_or_else_as_planned() -> None:
    plan = Plan(np.full((1, 2), 2.0), 4, 16, tuning=Tuning(micro_batch=2))
    assert micro_batch_for(None, plan) == 2
    assert micro_batch_for(3, plan) == 3
    assert micro_batch_for(None, Plan(np.full((1, 2), 2.0), 4, 16)) is None
    assert micro_batch_for(None, None) is None
    timeline = Timeline("planned")
    with closing(SparseAttention(GEOMETRY, fast="4MiB", dram="8MiB", plan=plan)) as engine:
        engine.watch(timeline)
        for tokens in (600, 1):
            text = torch.randn(4, 2, tokens, 16)
            engine.attend(0, torch.randn(4, 4, tokens, 16), text, text, scale=0.25)
    assert [span.name for span in timeline.spans].count("select") == 2


def test_the_engine_indexes_as_the_plan_says() -> None:
    sizes = []
    for tokens in (8.0, 32.0):
        plan = Plan(np.full((1, 2), 2.0), 4, 16, tuning=Tuning(tokens))
        engine = SparseAttention(GEOMETRY, fast="4MiB", dram="8MiB", plan=plan)
        past = torch.randn(1, 2, 600, 16)
        engine.absorb(0, past, past, scale=0.25)
        sizes.append(engine.report().index_bytes)
        engine.close()
    assert sizes[0] > 2 * sizes[1]


def test_pinned_blocks_go_to_the_heads_that_miss_most_below_their_windows() -> None:
    misses = np.zeros((1, 2, len(WINDOWS)))
    misses[0, 0], misses[0, 1] = 0.01 / WINDOWS, 1 / WINDOWS
    windows = allocate_windows(misses[0], 2.0).reshape(1, 2)
    pinned = pinned_below(misses, windows, 1.0, np.ones((1, 2)))
    assert pinned.min() >= 0
    assert pinned.mean() <= 1.0 + 1e-9
    assert pinned[0, 1] > pinned[0, 0]
