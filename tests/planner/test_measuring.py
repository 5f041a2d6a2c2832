"""Measuring a machine, at sizes that take no time: every rate is there and right in kind."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tierstore.adapters.attention import Geometry
from tierstore.adapters.planner import measuring
from tierstore.adapters.planner.stages import LayerStages, Times
from tierstore.adapters.presets import PRESETS
from tierstore.errors import CapacityError, ConfigError
from tierstore.hardware import Hardware
from tierstore.tiers import FileTier

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "FILE_BYTES": 4 << 20, "_READ_BYTES": 1 << 20, "_MEMORY_BYTES": 1 << 20, "_MATRIX": 32,
        "_RUNS": 1, "_LEAST_SECONDS": 1e-4, "_CACHED_BLOCKS": 64, "_LINK_BLOCKS": 256,
        "_MOVED_BLOCKS": 64, "_CONTEXTS": (256, 1024), "_STEPS": 12,
        "GEOMETRY": Geometry(1, 4, 2, 16, torch.bfloat16, torch.device("cpu")),
    }.items():  # fmt: skip
        monkeypatch.setattr(measuring, name, size)


@pytest.mark.usefixtures("tiny")
def test_this_machine_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    found = measuring.measure(tmp_path, said.append)
    assert list(tmp_path.iterdir()) == []
    assert "disk" in said
    assert found.is_one
    assert found.device == found.host
    assert [size for size, _ in found.disk] == list(measuring.READ_SIZES)
    assert 0 < found.device.launch < 1
    assert found.device.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert Hardware.from_dict(found.to_dict()) == found


def test_a_disk_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="disk="):
        measuring.disk_rates(tmp_path / "file")


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise CapacityError("no space")

    monkeypatch.setattr(FileTier, "resize", full)
    with pytest.raises(ConfigError, match="cannot be written and read there"):
        measuring.disk_rates(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert measuring.seconds_of(call) == pytest.approx(0.25)


def stages(window: float, tokens: int = 800, files: Path | None = None) -> LayerStages:
    geometry = Geometry(1, 4, 2, 16, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(2, tokens, 16, generator=generator) for _ in range(2))
    return LayerStages(
        geometry, PRESETS["kvdrive"], key, value, None, budget=tokens // 8, window=window,
        scale=0.25, files=files,
    )  # fmt: skip


def test_a_step_is_taken_apart(tmp_path: Path) -> None:
    for files in (None, tmp_path):
        layer = stages(1.0, files=files)
        steps = [layer.step(torch.randn(2, 2, 16)) for _ in range(6)]
        assert all(min(vars(step).values()) >= 0 for step in steps)
        assert steps[0].missed == 1.0
        assert steps[0].fetch > 0
        layer.close()


def test_with_everything_resident_nothing_is_fetched() -> None:
    layer = stages(8.0)
    query = torch.randn(2, 2, 16)
    layer.step(query)
    again = layer.step(query)
    assert again.missed == again.fetch == 0
    assert [len(row) for row in layer.selected(query)] == [25, 25]
    layer.close()


def test_the_median_is_taken_stage_by_stage() -> None:
    steps = [Times(1, 9, 0, 2, 0.5), Times(2, 1, 0, 3, 0.25), Times(3, 2, 9, 1, 0.75)]
    assert Times.median(steps) == Times(2, 2, 0, 2, 0.5)
    assert math.isclose(Times.median(steps[:2]).judge, 5)
