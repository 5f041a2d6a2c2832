"""Sizes of models and systems against figures worked out by hand from their papers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tierstore.adapters.planner.locality import covered_share, extents_touched, reload_share
from tierstore.adapters.planner.models import MODELS, model_named
from tierstore.adapters.planner.systems import SYSTEMS, system_named
from tierstore.errors import ConfigError

LLAMA = MODELS["llama3-8b"]
N = 122_880


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("phi4-mini", 3.84),
        ("smollm2", 0.1345),
    ],
)
def test_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert model_named(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_token_of_llama_takes_128_kib() -> None:
    assert LLAMA.kv_bytes * LLAMA.layers == 128 << 10
    assert N * LLAMA.kv_bytes * LLAMA.layers / 2**30 == pytest.approx(15.0)


# Bytes for each token of a layer with 8 KV heads of 128, and bytes whatever the context.
@pytest.mark.parametrize(
    ("name", "medium", "per_token", "constant"),
    [
        ("quest", "device", 256, 0),
        ("shadowkv", "device", 584, 327_680),
        ("retroinfer", "device", 128, 0),
        ("retroinfer-e", "device", 257.5, 0),
        ("kvdrive", "device", 2048 / 15, 0),
        ("magicpig", "host", 4800, 9_830_400),
        ("pqcache", "host", 128, 0),
        ("infinigen", "device", 400, 2 * 25 * 32 * 4096),
    ],
)
def test_indexes_have_the_bytes_of_their_papers(
    name: str, medium: str, per_token: float, constant: int
) -> None:
    system = SYSTEMS[name]
    index = system.device_index if medium == "device" else system.host_index
    assert index(LLAMA, N) - index(LLAMA, 0) == pytest.approx(per_token * N)
    assert index(LLAMA, 0) == constant


def test_the_index_of_kvdrive_is_half_of_chunks_and_a_quarter_of_quest() -> None:
    kvdrive, quest = (SYSTEMS[name].device_index(LLAMA, N) for name in ("kvdrive", "quest"))
    assert quest / kvdrive == pytest.approx(15 / 8)
    assert kvdrive * LLAMA.layers / 2**30 == pytest.approx(0.50, abs=0.01)


def test_only_systems_that_keep_blocks_leave_the_window_open() -> None:
    assert {name for name, system in SYSTEMS.items() if system.window is None} == {
        "kvdrive",
        "best",
    }


@pytest.mark.parametrize(
    ("budget", "reloads"),
    [(1 / 64, (1, 0.362, 0.210, 0.151)), (1 / 32, (1, 0.334, 0.167, 0.107)),
     (1 / 16, (1, 0.299, 0.121, 0.067))],
)  # fmt: skip
def test_reloads_are_those_that_were_measured(budget: float, reloads: tuple[float, ...]) -> None:
    found = [reload_share(window, budget) for window in (0, 1, 2, 3)]
    assert found == pytest.approx(reloads)


def test_larger_windows_reload_less_and_the_whole_context_nothing() -> None:
    found = [reload_share(0.25 * i, 1 / 32) for i in range(60)]
    assert all(one > other for one, other in pairwise(found))
    assert reload_share(32, 1 / 32) == 0
    assert reload_share(2, 0.5) == 0


def test_more_placed_blocks_serve_more() -> None:
    assert covered_share(0) == 0
    assert covered_share(0.125) == pytest.approx(0.886)
    assert covered_share(1) == 1


def test_extents_are_no_more_than_the_blocks_in_them_nor_than_there_are() -> None:
    for wanted in (0.5, 1, 10, 1_000, 100_000):
        for each in (1, 2, 32):
            touched = extents_touched(wanted, 4_000, each, 0.5)
            assert 0 < touched <= wanted
            assert touched <= 4_000 / each
    assert extents_touched(0, 4_000, 32, 0.5) == 0
    # All blocks at random in one extent.
    assert extents_touched(500, 32, 32, 1.0) == 1


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="model='gpt': expected one of llama3-8b"):
        model_named("gpt")
    with pytest.raises(ConfigError, match="system='lru': expected one of full"):
        system_named("lru")
