"""The benchmark of predictions at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from bench_schema import as_json

from tierstore.adapters.attention import Geometry
from tierstore.benchmarks import predict
from tierstore.hardware import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tierstore.adapters.models import LoadedModel

GEOMETRY = Geometry(2, 4, 2, 16, torch.bfloat16, torch.device("cpu"))


def test_predictions_stand_beside_measurements(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(PRESETS["reference"], name="here")
    monkeypatch.setattr(predict, "measure_machine", lambda *_: here)
    for name in ("STEPS", "_WARM", "_MODEL_STEPS"):
        monkeypatch.setattr(predict, name, 4)
    monkeypatch.setattr(predict, "_BUDGETS", (1 / 16,))
    monkeypatch.setattr(predict, "_WINDOWS", (2.0,))
    said: list[str] = []
    findings = predict.measure(
        said.append, tiny_model, GEOMETRY, repeat=1, tokens=2_048, disk=tmp_path
    )
    data = as_json(findings)
    steps = data["measures"]["step"]["values"]
    cases = [name for name in steps if not name.endswith(("blind", "informed"))]
    assert len(cases) == 4 + 2
    assert all(steps[f"{case}, {kind}"][0] > 0 for case in cases for kind in ("blind", "informed"))
    assert data["details"]["hardware"]["name"] == "here"
    assert set(data["measures"]["where"]["values"]) == {
        f"{where}, {attended}"
        for where in ("fetch", "in-tier", "auto")
        for attended in ("residents", "selected")
    }
    assert data["notes"][0].startswith("Error of the prediction: blind: ")
    assert findings.tables[0].row_count == 6
    assert list(tmp_path.iterdir()) == []
    assert said[-1].startswith("where, round 1 of 1")
