"""How the fast tier's limit is shared out between rows as the context grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import CapacityError
from tierstore.policies.fair import fair_shares
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from tierstore.interfaces import Ids, Pointers
    from tierstore.store import BlockStore


def reserve_backing(store: BlockStore, blocks: int) -> None:
    """Take the backing tier's room for prompts at once: a tier too small is known early."""
    tier = store.tiers[store.backing]
    size = store.layout.block_bytes
    limit = store.limit(store.backing)
    if blocks > limit:
        raise CapacityError(
            f"{tier.name}: the KV cache of this prompt takes {format_size(blocks * size)}, but "
            f"there is room for {format_size(limit * size)}: raise {tier.name}= or add disk="
        )
    slots = min(limit, blocks + blocks // 16)
    if slots > tier.capacity:
        store.resize(store.backing, slots)


def fit_middle_tiers(store: BlockStore, blocks: int) -> None:
    """Let the tiers between first and last hold all `blocks`, as far as their limits allow."""
    for level in range(1, store.backing):
        wanted = min(store.limit(level), blocks + blocks // 8)
        if wanted > store.tiers[level].capacity:
            store.resize(level, wanted)


def fit_top_tier(
    store: BlockStore,
    segments: Ids,
    wanted: Pointers,
    reserved_bytes: int,
    sequences: Pointers | None = None,
) -> None:
    """Give each segment, a domain of its own, its share of the top tier.

    Parameters
    ----------
    wanted: blocks that each segment could use. All get that if it fits. If not, sequences get
        `fair_shares`, and the segments of one the same share of what they want.
    reserved_bytes: room to leave for other data of the tier that is still to come.
    sequences: the sequence of each segment; None for one sequence.
    """
    tier, size = store.tiers[0], store.layout.block_bytes
    wanted = np.maximum(wanted, 1)
    slots = min(int(wanted.sum()), store.limit(0) - -(-reserved_bytes // size))
    if slots < len(segments):
        other = 0 if tier.memory is None else tier.memory.used_bytes - tier.memory.slot_bytes
        needed = other + reserved_bytes + len(segments) * size
        raise CapacityError(
            f"{tier.name}: the limit must hold index, sinks, local windows and work space "
            f"({format_size(other + reserved_bytes)}) and at least one block per layer and KV "
            f"head: raise {tier.name}= to more than {format_size(needed)}"
        )
    quota = _quotas(wanted, slots, np.zeros_like(wanted) if sequences is None else sequences)
    if slots > tier.capacity:
        store.resize(0, slots)
    store.set_quota(segments, quota)
    if slots < tier.capacity:
        store.resize(0, slots)


def _quotas(wanted: Pointers, slots: int, sequences: Pointers) -> Pointers:
    """Blocks of each segment, from 1 to what it wants, and no more than `slots` together."""
    beyond_one = wanted - 1
    of_sequence = np.bincount(sequences, beyond_one).astype(np.int64)
    shares = fair_shares(of_sequence, slots - len(wanted))
    return 1 + beyond_one * shares[sequences] // np.maximum(of_sequence, 1)[sequences]
