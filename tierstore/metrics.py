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
    """Counters of a store, tier by tier."""

    def __init__(self, names: list[str]) -> None:
        self.tiers = [TierMetrics(name) for name in names]

    @property
    def selected(self) -> int:
        """Blocks selected so far."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        """Share of selected blocks that were already in the top tier; 1.0 before the first."""
        return self.tiers[0].hits / self.selected if self.selected else 1.0
