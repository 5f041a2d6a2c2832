"""The replay benchmark runs, and finds the same misses as libCacheSim where that is installed."""

from __future__ import annotations

import importlib.util

import pytest
from bench_schema import as_json

from tierstore.benchmarks.replay import measure


@pytest.mark.parametrize("has_library", [True, False])
def test_the_benchmark_measures_speed_and_misses(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_library:
        pytest.importorskip("libcachesim")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told: list[str] = []

    data = as_json(measure(told.append, repeat=1, requests=5_000, blocks=500, capacity=50))

    misses = data["measures"]["misses"]["values"]
    assert 0 < misses["belady"][0] < misses["lru"][0] < 5_000
    for name in ("lru", "clock", "sieve", "arc", "s3-fifo", "belady"):
        assert not has_library or misses[name] == misses[f"{name}, libcachesim"]
    assert len(told) == 1
    assert sum("target" in note for note in data["notes"]) == 5
