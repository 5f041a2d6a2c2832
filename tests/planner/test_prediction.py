"""Predictions: stages, schedules, memory, and what is chosen, against counts made here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.adapters.planner.models import MODELS
from tierstore.adapters.planner.pipelining import Stage, layer_seconds
from tierstore.adapters.planner.prediction import (
    MICRO_BATCHES,
    WINDOWS,
    Load,
    Prediction,
    best_of,
    predict,
    predict_all,
)
from tierstore.adapters.planner.systems import SYSTEMS
from tierstore.hardware import PRESETS

LLAMA, L20 = MODELS["llama3-8b"], PRESETS["l20"]
LOAD = Load(LLAMA, 122_880, 8, 1 / 64)
GIB = 1 << 30

seconds = st.floats(0, 5, allow_subnormal=False)


@given(st.tuples(seconds, seconds, seconds), seconds, st.integers(1, 6))
def test_three_resources_are_a_flow_shop(
    lengths: tuple[float, float, float], after: float, count: int
) -> None:
    """Johnson's recurrence: a stage begins when the one before, and its resource, are done."""
    done = [0.0, 0.0, 0.0]
    for _ in range(count):
        ready = 0.0
        for position, length in enumerate(lengths):
            ready = done[position] = max(ready, done[position]) + length
    ahead = [
        Stage(name, length) for name, length in zip(("device", "b", "c"), lengths, strict=True)
    ]
    assert layer_seconds("sfc", ahead, after, count) == pytest.approx(done[2] + after, abs=1e-9)


def test_schedules_differ_in_what_they_overlap() -> None:
    ahead = [Stage("device", 1.0), Stage("host", 2.0), Stage("link", 3.0)]
    assert layer_seconds("sequential", ahead, 4.0, 1) == 10
    assert layer_seconds("sfc", ahead, 4.0, 1) == 10
    # The device guesses for the next layer before it computes: 1 + 4. Fetching takes no longer.
    assert layer_seconds("previous-layer", ahead, 4.0, 1) == 5
    # The link works for 9 of 12; select and judge of the first micro-batch come before.
    assert layer_seconds("sfc", ahead, 4.0, 3) == 1 + 2 + 9 + 4


def test_a_sequential_step_is_the_sum_of_its_stages() -> None:
    for name in ("full", "quest", "shadowkv", "retroinfer"):
        found = predict(SYSTEMS[name], LOAD, L20)
        assert found.step_seconds == pytest.approx(sum(found.stages.values()))
        assert found.tokens_per_second == pytest.approx(8 / found.step_seconds)


@pytest.mark.parametrize("name", ["kvdrive", "best"])
def test_one_micro_batch_is_a_sequential_step(name: str) -> None:
    found = predict(SYSTEMS[name], LOAD, L20)
    assert found.step_seconds == pytest.approx(sum(found.stages.values()))


def test_a_step_without_cache_moves_its_budget_over_the_link() -> None:
    # 2,048 tokens of 128 KiB: 268 MB for each sequence.
    load = Load(LLAMA, 131_072, 1, 1 / 64)
    found = predict(SYSTEMS["quest"], load, L20)
    moved = (found.stages["fetch"] - 32 * L20.device.launch) * L20.link
    assert moved == pytest.approx(268e6, rel=0.01)


def test_full_attention_on_the_device_reads_everything_once() -> None:
    load = Load(LLAMA, 122_880, 1, 1 / 64)
    found = predict(SYSTEMS["full"], load, L20)
    assert found.stages["fetch"] == found.stages["select"] == 0
    read = (found.stages["attend"] - 32 * L20.device.launch) * L20.device.memory
    assert read == pytest.approx(15 * GIB, rel=1e-6)
    assert found.footprint.device > 30 * GIB


def test_magicpig_is_out_of_a_hundred_gigabytes_at_batch_three() -> None:
    host = L20.with_memory(None, 100 * 10**9)
    fits = [predict(SYSTEMS["magicpig"], replace(LOAD, batch=n), host).fits for n in (1, 2, 3)]
    assert fits == [True, True, False]


def test_what_is_out_of_memory_says_of_which() -> None:
    host = L20.with_memory(None, 100 * GIB)
    lacks = {each.system: each.footprint.lacks for each in predict_all(LOAD, host)}
    assert lacks["full"] == "device"
    assert lacks["magicpig"] == lacks["quest"] == "host"
    assert lacks["kvdrive"] == lacks["best"] == lacks["flexgen"] == ""


def test_what_spills_keeps_everything_on_disk_and_never_exceeds_the_host() -> None:
    host = L20.with_memory(None, 60 * GIB)
    found = best_of(SYSTEMS["kvdrive"], LOAD, host)
    assert found.footprint.disk == 8 * 15 * GIB
    assert found.footprint.host <= 60 * GIB * (1 + 1e-9)
    assert found.fits


def test_half_of_the_blocks_in_dram_serve_nearly_all_that_is_missed() -> None:
    load = replace(LOAD, window=1.0, extent_bytes=4096)
    fetch = [
        predict(SYSTEMS["kvdrive"], load, L20.with_memory(None, size)).stages["fetch"]
        for size in (1, 60 * GIB)
    ]
    assert fetch[1] < fetch[0] / 3


def test_less_memory_is_never_faster() -> None:
    speeds = [
        best_of(SYSTEMS["kvdrive"], LOAD, L20.with_memory(None, size * GIB)).tokens_per_second
        for size in (8, 16, 32, 64, 128, 256)
    ]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("name", ["kvdrive", "best"])
@pytest.mark.parametrize("hardware", [L20, PRESETS["h200"].with_memory(None, 40 * GIB)])
def test_the_choice_is_the_fastest_of_all_that_fit(name: str, hardware: object) -> None:
    assert isinstance(hardware, type(L20))
    every: list[Prediction] = []
    for window in WINDOWS:
        for count in MICRO_BATCHES:
            if count <= LOAD.batch:
                load = replace(LOAD, window=window, micro_batches=count)
                every.append(predict(SYSTEMS[name], load, hardware))
    fitting = [each.tokens_per_second for each in every if each.fits]
    assert best_of(SYSTEMS[name], LOAD, hardware).tokens_per_second == max(fitting)


def test_misses_and_bytes_that_are_known_replace_the_curve() -> None:
    host = L20.with_memory(None, 1)
    load = replace(LOAD, reload=0.5, extent_bytes=65536, disk_bytes=3.2e9)
    found = predict(SYSTEMS["kvdrive"], load, host)
    assert found.missed == 0.5
    expected = 3.2e9 / L20.disk_rate(65536) + 32 * L20.device.launch
    assert found.stages["fetch"] == pytest.approx(expected)


def test_one_processor_has_one_memory() -> None:
    here = PRESETS["reference"]
    small = Load(MODELS["smollm2"], 8_192, 1, 1 / 16)
    found = predict(SYSTEMS["kvdrive"], small, here)
    assert found.fits
    crowded = here.with_memory(None, int(found.footprint.device))
    assert best_of(SYSTEMS["quest"], small, crowded).footprint.lacks == "host"
