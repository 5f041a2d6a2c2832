"""A short run of the endurance benchmark: memory, its accountant and the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_schema import as_json

from tierstore.adapters.attention import SparseAttention
from tierstore.benchmarks import endurance

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROMPT": (40, 250), "LONGEST": 300, "SAMPLES": 20, "FAST": 900 << 10, "DRAM": 256 << 10,
    }.items():  # fmt: skip
        monkeypatch.setattr(endurance, name, value)


def test_memory_stays_flat_and_outputs_exact(tmp_path: Path) -> None:
    data = as_json(endurance.run(lambda _: None, steps=300, disk=tmp_path))
    assert data["details"]["worst drift in bytes"] == 0
    assert data["details"]["worst error"] < 1e-5
    assert data["details"]["finished"] > 3
    memory = data["measures"]["memory"]["values"]
    assert max(memory["late"]) < 1.1 * max(memory["early"])
    tiers = data["details"]["tiers"]["tiers"]
    assert [tier["name"] for tier in tiers] == ["fast", "dram", "disk"]
    assert all(tier["bytes_written"] > 0 for tier in tiers)
    assert all(tier["evictions"] > 0 for tier in tiers[:2])
    assert not list(tmp_path.iterdir())


def test_a_wrong_output_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is no copy of what it checks."""
    step = SparseAttention.step

    def off(
        self: SparseAttention, layer: int, *tokens: torch.Tensor, **names: object
    ) -> torch.Tensor:
        out: torch.Tensor = step(self, layer, *tokens, **names)  # type: ignore[arg-type]
        return out * 1.001 if layer else out

    monkeypatch.setattr(SparseAttention, "step", off)
    findings = endurance.run(lambda _: None, steps=40, disk=tmp_path)
    assert findings.details["worst error"] > 1e-4  # type: ignore[operator]
