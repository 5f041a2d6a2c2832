"""A short run of the endurance benchmark: memory, its accountant and the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from bench_schema import as_json

from tierstore.benchmarks import endurance

if TYPE_CHECKING:
    from pathlib import Path


def test_memory_stays_flat_and_outputs_exact(tmp_path: Path) -> None:
    data = as_json(endurance.run(lambda _: None, steps=400, disk=tmp_path))
    assert data["details"]["worst drift in bytes"] == 0
    assert data["details"]["worst error"] < 1e-5
    assert data["settings"]["samples"] >= 100
    memory = data["measures"]["memory"]["values"]
    assert max(memory["late"]) < 1.05 * max(memory["early"])
    for tier in data["details"]["tiers"]["tiers"]:
        assert tier["bytes_written"] > 0
    assert all(tier["evictions"] > 0 for tier in data["details"]["tiers"]["tiers"][:2])
    assert not list(tmp_path.iterdir())


def test_a_wrong_output_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is no copy of what it checks."""
    step = endurance.SparseAttention.step

    def off(self: endurance.SparseAttention, layer: int, *tokens: torch.Tensor, **names: object):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return step(self, layer, *tokens, **names) * (1.001 if layer else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(endurance.SparseAttention, "step", off)
    findings = endurance.run(lambda _: None, steps=120, disk=tmp_path)
    assert findings.details["worst error"] > 1e-4  # type: ignore[operator]
