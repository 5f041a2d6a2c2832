"""The batching benchmark on a tiny model: what it measures and reports, not how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_schema import as_json

from tierstore.benchmarks import batching

if TYPE_CHECKING:
    from tierstore.adapters.models import LoadedModel


def test_measures_batches_and_contexts(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "STEPS", 3)
    said: list[str] = []
    contexts = {"short": 100, "middle": 200, "long": 400}
    same = {"exact": [True, False]}
    data = as_json(batching.measure(said.append, tiny_model, 1, 80, same, contexts))
    assert list(data["measures"]["throughput"]["values"]) == [
        "batch 1", "batch 2", "batch 4", "batch 8",
    ]  # fmt: skip
    for name in ("step", "selecting"):
        assert list(data["measures"][name]["values"]) == list(contexts)
    assert data["details"]["same as alone"] == {"exact": [True, False]}
    assert "1 of 2 requests" in data["notes"][0]
    assert any("tokens/s" in line for line in said)


@pytest.mark.parametrize("preset", ["exact", "kvdrive"])
def test_requests_get_what_they_get_alone(
    tiny_model: LoadedModel, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "REQUESTS", ((150, 9), (20, 12), (250, 5), (90, 10)))
    assert all(batching.compare(lambda _: None, tiny_model, preset))
