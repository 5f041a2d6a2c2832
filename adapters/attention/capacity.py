"""How the fast tier's limit is shared out between rows as the context grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import CapacityError
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from tierstore.interfaces import Ids, Pointers
    from tierstore.store import BlockStore


def reserve_backing(store: BlockStore, blocks: int) -> None:
    """Take the backing tier's room for a prompt at once: a tier too small is known early."""
    tier = store.tiers[store.backing]
    size = store.layout.block_bytes
    limit = store.limit(store.backing)
    if blocks > limit:
        raise CapacityError(
            f"{tier.name}: the KV cache of this prompt takes {format_size(blocks * size)}, but "
            f"there is room for {format_size(limit * size)}: raise {tier.name}= or add disk="
        )
    store.resize(store.backing, min(limit, blocks + blocks // 16))


def fit_middle_tiers(store: BlockStore, blocks: int) -> None:
    """Let the tiers between first and last hold all `blocks`, as far as their limits allow."""
    for level in range(1, store.backing):
        wanted = min(store.limit(level), blocks + blocks // 8)
        if wanted > store.tiers[level].capacity:
            store.resize(level, wanted)


def fit_top_tier(store: BlockStore, segments: Ids, wanted: Pointers, reserved_bytes: int) -> None:
    """Give each segment, a domain of its own, its share of the top tier.

    Parameters
    ----------
    wanted: blocks that each segment could use. All get that if it fits, else the same share of it.
    reserved_bytes: room to leave for other data of the tier that is still to come.
    """
    tier, size = store.tiers[0], store.layout.block_bytes
    total = int(np.maximum(wanted, 1).sum())
    slots = min(total, store.limit(0) - -(-reserved_bytes // size))
    if slots < len(segments):
        other = 0 if tier.memory is None else tier.memory.used_bytes - tier.memory.slot_bytes
        needed = other + reserved_bytes + len(segments) * size
        raise CapacityError(
            f"{tier.name}: the limit must hold index, sinks, local windows and work space "
            f"({format_size(other + reserved_bytes)}) and at least one block per layer and KV "
            f"head: raise {tier.name}= to more than {format_size(needed)}"
        )
    beyond_one = np.maximum(wanted - 1, 0)
    quota = 1 + beyond_one * (slots - len(segments)) // max(int(beyond_one.sum()), 1)
    if slots > tier.capacity:
        store.resize(0, slots)
    store.set_quota(segments, np.minimum(quota, np.maximum(wanted, 1)))
    if slots < tier.capacity:
        store.resize(0, slots)
