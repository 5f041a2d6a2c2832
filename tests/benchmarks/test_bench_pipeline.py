"""The pipeline benchmark at tiny sizes, and the bound that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from bench_schema import as_json

from tierstore.adapters.attention import Geometry
from tierstore.benchmarks import pipeline
from tierstore.benchmarks.stage_times import StageTimes
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = Geometry(2, 4, 2, 16, torch.bfloat16, torch.device("cpu"))


def test_measures_every_schedule_in_the_same_rounds(tmp_path: Path) -> None:
    said: list[str] = []
    found = pipeline.measure(said.append, GEOMETRY, repeat=1, tokens=400, disk=tmp_path)
    data = as_json(found)
    assert set(data["measures"]["step"]["values"]) == set(pipeline.CONFIGURATIONS)
    assert [ratio["at_least"] for ratio in data["ratios"]] == [1.25, None, None, 0.97, None, 1.0]
    assert list(data["measures"]["throughput"]["values"]) == [
        "batch 1", "batch 2", "batch 4", "batch 8"
    ]  # fmt: skip
    tiers = data["details"]["tiers"]
    assert tiers["sequential"]["fetched_bytes"] == tiers["memory sequential"]["fetched_bytes"] or (
        tiers["sequential"]["fetched_bytes"] > 0
    )
    assert tiers["memory sfc"]["hit_rate"] == 1
    assert data["settings"]["disk"].startswith("files (")
    assert set(data["details"]["stage seconds"]) == {"select", "judge", "fetch", "compute"}
    assert said[-1].startswith("batch of 1: ")
    assert list(tmp_path.iterdir()) == []


def test_the_bound_is_the_longest_stage_with_its_run_up() -> None:
    timeline = Timeline()
    for step in range(2):
        for layer in range(3):
            at = 10.0 * (3 * step + layer)
            for name, seconds in (("select", 4), ("judge", 0.4), ("fetch", 2), ("compute", 1)):
                timeline.add(name, "x", at, at + seconds, step=step, layer=layer)
    times = StageTimes.of(timeline, 4)
    assert times.seconds == pytest.approx({"select": 4, "judge": 0.4, "fetch": 2, "compute": 1})
    assert times.sequential == pytest.approx(7.4)
    # Four selections of 1, then the last judging of 0.1, its fetch of 0.5, and the computation.
    assert times.bound == pytest.approx(4 + 0.1 + 0.5 + 1)
    assert times.hideable == pytest.approx(4.4 / 7.4)
    assert "select and judge are 59% of it" in str(times)
