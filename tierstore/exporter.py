"""The counters of keyed stores, as metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from tierstore.keyed import KeyedStore
    from tierstore.metrics import KeyedStats

_COUNTERS: dict[str, tuple[str, str, str]] = {
    "hits": ("tierstore_keyed_hits", "tier", "Values served"),
    "misses": ("tierstore_keyed_misses", "reason", "Values asked for and not served"),
    "refused": ("tierstore_keyed_refused", "reason", "Values not taken"),
    "dropped": ("tierstore_keyed_dropped", "reason", "Values that are gone"),
    "errors": ("tierstore_keyed_disk_errors", "error", "Failed calls of the disk"),
}
_GAUGES: dict[str, tuple[str, str, Callable[[KeyedStats], float]]] = {
    "records": ("tierstore_keyed_records", "Values held", lambda s: s.records),
    "disk_bytes": ("tierstore_keyed_disk_bytes", "Bytes reserved on disk", lambda s: s.disk_bytes),
    "dram_bytes": (
        "tierstore_keyed_dram_bytes", "Bytes of values in memory", lambda s: s.dram_bytes,
    ),
    "metadata_bytes": (
        "tierstore_keyed_metadata_bytes", "Bytes of tables in memory", lambda s: s.metadata_bytes,
    ),
    "leases": ("tierstore_keyed_leases", "Leases held", lambda s: s.leases),
    "is_offline": (
        "tierstore_keyed_offline", "1 if the disk is left alone after errors",
        lambda s: s.is_offline,
    ),
    "reads": (
        "tierstore_keyed_direct_reads", "1 if reads pass the page cache by",
        lambda s: s.reads == "direct",
    ),
}  # fmt: skip
"""Field of `KeyedStats` to metric, help and value."""


class StoreCollector:
    """A collector of prometheus-client over some stores: ``REGISTRY.register(collector)``.

    Every metric has the label ``namespace``, counters one more: ``tier``, ``reason`` or ``error``.
    Counters begin at none when a store is opened. A closed store has no metrics.

    Parameters
    ----------
    stores: by what their label ``namespace`` is to say.

    MissingExtraError without the package prometheus-client, ConfigError for anything but stores.
    """

    def __init__(self, stores: Mapping[str, KeyedStore]) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise MissingExtraError("prometheus-client", "metrics", "StoreCollector") from error
        for name, store in stores.items():
            if not isinstance(name, str) or not hasattr(store, "stats"):
                raise ConfigError(f"stores={{{name!r}: {store!r}}}: expected KeyedStores by name")
        self._stores = dict(stores)
        self._core = core

    def describe(self) -> list[Metric]:
        """Every metric without a sample, so that registering one touches no store."""
        return list(self._metrics({}))

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        stats = {name: store.stats() for name, store in self._stores.items() if not store.is_closed}
        return self._metrics(stats)

    def _metrics(self, stats: Mapping[str, KeyedStats]) -> Iterator[Metric]:
        for field, (name, label, text) in _COUNTERS.items():
            counter = self._core.CounterMetricFamily(
                name, f"{text}, by {label}.", labels=["namespace", label]
            )
            for namespace, own in stats.items():
                for kind, count in sorted(getattr(own, field).items()):
                    counter.add_metric([namespace, kind], float(count))
            yield counter
        for name, text, value in _GAUGES.values():
            gauge = self._core.GaugeMetricFamily(name, f"{text}.", labels=["namespace"])
            for namespace, own in stats.items():
                gauge.add_metric([namespace], float(value(own)))
            yield gauge
