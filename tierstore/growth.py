"""Slots that come with the blocks that want them: a tier under the top grows up to its quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.directory import TABLE_BYTES_PER_SLOT

if TYPE_CHECKING:
    from tierstore.directory import Residency
    from tierstore.interfaces import Tier
    from tierstore.memory import Memory

_STEPS = 16
"""A tier grows by 1/16 of its quotas at least: each time costs O(slots)."""


def most_slots(tier: Tier, tables: Memory) -> int:
    """Slots that a tier could have at most, with the entries that go with them in `tables`."""
    size = tier.layout.block_bytes
    if tier.memory is not tables:
        return tier.limit
    while_growing = tier.capacity * TABLE_BYTES_PER_SLOT
    room = (tier.limit - tier.capacity) * size - while_growing
    return tier.capacity + max(0, room // (size + TABLE_BYTES_PER_SLOT))


def grow(tier: Tier, residency: Residency, short: int, tables: Memory) -> None:
    """Give a tier `short` more slots, as far as quotas and limit allow."""
    if short <= 0:
        return
    quotas = int(residency.quota.sum())
    wanted = residency.slots + max(short, quotas // _STEPS)
    slots = min(quotas, wanted, most_slots(tier, tables))
    if slots > residency.slots:
        residency.reserve(slots, 0)
        tier.resize(slots)
        residency.resize(slots)
