"""Counters of what moved where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierMetrics:
    """What happened at one tier. hits: selected blocks that it served. Bytes are block payloads."""

    name: str
    hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    demotions: int = 0


class StoreMetrics:
    """Counters of a store, tier by tier.

    fetched: selected blocks that were brought into the top tier. filtered: selected blocks that
    were left where they are, since they were not worth it. fetch_seconds: what
    fetches took, each by itself: several may be under way at once. What the disk does while
    room is made for its blocks is not in it.
    """

    def __init__(self, names: list[str]) -> None:
        self.tiers = [TierMetrics(name) for name in names]
        self.fetched = 0
        self.filtered = 0
        self.fetch_seconds = 0.0

    @property
    def selected(self) -> int:
        """Blocks selected so far."""
        return sum(tier.hits for tier in self.tiers) + self.filtered

    @property
    def hit_rate(self) -> float:
        """Share of selected blocks that were already in the top tier; 1.0 before the first."""
        return self.tiers[0].hits / self.selected if self.selected else 1.0


@dataclass(frozen=True)
class KeyedStats:
    """What a keyed store holds and what happened since it was opened.

    records: values that it has. hits: values served, by tier. misses: by reason; ``absent`` was
    never put, or is gone. refused: values not taken, by reason; ``all pinned`` had no room because
    what is there is leased, or being read. dropped: values that are gone, by reason. errors: failed
    calls of the disk, by name. disk_bytes, dram_bytes: occupied, tables and directory included.
    metadata_bytes: tables in memory that describe the values. leases: held now.
    """

    records: int
    hits: dict[str, int]
    misses: dict[str, int]
    refused: dict[str, int]
    dropped: dict[str, int]
    errors: dict[str, int]
    disk_bytes: int
    dram_bytes: int
    metadata_bytes: int
    leases: int
    is_offline: bool
    reads: str
    """``"direct"``, or ``"buffered"`` where the file system takes no direct reads."""
