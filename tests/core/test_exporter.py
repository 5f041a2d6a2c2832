"""Metrics of keyed stores in a real registry of prometheus-client."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import prometheus_client
import pytest

from tierstore import exporter
from tierstore.errors import ConfigError, MissingExtraError
from tierstore.exporter import StoreCollector
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.metrics import KeyedStats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyedStore]:
    with KeyedStore(
        tmp_path / "kv", Identity(model="m"), disk="2MiB", dram="256KiB", segment="128KiB"
    ) as store:
        yield store


def registry_of(stores: dict[str, KeyedStore]) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    registry.register(StoreCollector(stores))
    return registry


def test_a_registry_shows_what_stats_say(store: KeyedStore) -> None:
    registry = registry_of({"main": store})
    store.put_many([b"a", b"b"], [b"1", b"2"])
    store.delete(b"b")
    store.get(b"a")
    store.get(b"b")
    store.put(b"huge", bytes(1 << 20))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"namespace": "main"} | labels)

    assert value("tierstore_keyed_records") == 1
    assert value("tierstore_keyed_hits_total", tier="disk") == 1
    assert value("tierstore_keyed_misses_total", reason="absent") == 1
    assert value("tierstore_keyed_dropped_total", reason="deleted") == 1
    assert value("tierstore_keyed_refused_total", reason="too large") == 1
    assert value("tierstore_keyed_offline") == 0
    assert value("tierstore_keyed_disk_bytes") == store.stats().disk_bytes
    assert value("tierstore_keyed_dropped_total", reason="corrupt") is None


def test_the_text_format_tells_counters_from_gauges(store: KeyedStore) -> None:
    store.get(b"a")
    text = prometheus_client.generate_latest(registry_of({"main": store})).decode()
    assert "# TYPE tierstore_keyed_records gauge" in text
    assert "# TYPE tierstore_keyed_misses_total counter" in text
    assert 'tierstore_keyed_misses_total{namespace="main",reason="absent"} 1.0' in text


def test_several_stores_are_told_apart_by_their_names(store: KeyedStore, tmp_path: Path) -> None:
    store.put(b"a", b"1")
    with KeyedStore(tmp_path / "other", Identity(), disk="2MiB", segment="128KiB") as other:
        registry = registry_of({"main": store, "other": other})
        assert registry.get_sample_value("tierstore_keyed_records", {"namespace": "main"}) == 1
        assert registry.get_sample_value("tierstore_keyed_records", {"namespace": "other"}) == 0


def test_a_closed_store_has_no_samples(store: KeyedStore) -> None:
    registry = registry_of({"main": store})
    store.close()
    assert registry.get_sample_value("tierstore_keyed_records", {"namespace": "main"}) is None


def test_every_field_of_the_stats_is_a_metric() -> None:
    fields = {field.name for field in dataclasses.fields(KeyedStats)}
    assert fields == exporter._COUNTERS.keys() | exporter._GAUGES.keys()


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected KeyedStores by name"):
        StoreCollector({"main": object()})  # type: ignore[dict-item]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"tierstore\[metrics\]"):
        StoreCollector({})
