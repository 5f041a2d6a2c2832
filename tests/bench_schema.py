"""The form of what ``--json`` writes, checked by hand."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.benchmarks.findings import Findings

KEYS = {
    "schema", "benchmark", "machine", "baseline", "settings", "configurations", "measures",
    "ratios", "notes", "details",
}  # fmt: skip
MACHINE_KEYS = {
    "cpu", "cores", "memory_bytes", "device", "system", "python", "versions", "threads",
    "environment", "load_average",
}  # fmt: skip


def as_json(findings: Findings) -> dict[str, Any]:
    """The findings after a trip through JSON; their form is right."""
    data: dict[str, Any] = json.loads(json.dumps(findings.to_dict(), allow_nan=False))
    assert set(data) == KEYS
    assert data["schema"] == 1
    assert set(data["machine"]) == MACHINE_KEYS
    assert {"tierstore", "torch", "numba"} <= set(data["machine"]["versions"])
    assert data["baseline"] in data["configurations"]
    for measure in data["measures"].values():
        check_measure(measure)
    for ratio in data["ratios"]:
        check_ratio(ratio, data["measures"])
    return data


def check_measure(measure: dict[str, Any]) -> None:
    """Every configuration has as many values, and a spread that is theirs."""
    assert set(measure) == {"unit", "values", "spread"}
    assert len({len(values) for values in measure["values"].values()}) == 1
    for name, values in measure["values"].items():
        check_spread(measure["spread"][name], values)


def check_ratio(ratio: dict[str, Any], measures: dict[str, Any]) -> None:
    """Its values are the quotients of values of the same round."""
    values = measures[ratio["measure"]]["values"]
    above, below = values[ratio["numerator"]], values[ratio["denominator"]]
    assert ratio["values"] == [a / b for a, b in zip(above, below, strict=True)]
    check_spread(ratio["spread"], ratio["values"])
    has_target = ratio["at_least"] is not None or ratio["at_most"] is not None
    assert isinstance(ratio["is_met"], bool) is has_target


def check_spread(spread: dict[str, float], values: list[float]) -> None:
    assert spread == {
        "min": min(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "max": max(values),
    }
