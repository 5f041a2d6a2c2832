"""How blocks come from disk: the four levels of the paper, side by side (K19 to K22)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention.speculation import SPECULATIVE
from tierstore.errors import ConfigError
from tierstore.policies.fair import fair_shares
from tierstore.tiers.paged import PagedTier, page_range
from tierstore.tiers.write_behind import WriteBehindTier

if TYPE_CHECKING:
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.interfaces import Ids, Pointers
    from tierstore.policies.plan import Plan
    from tierstore.policies.profile import Amounts
    from tierstore.store import BlockStore


@dataclass(frozen=True)
class SyncLevel:
    """How a step gets blocks that are on disk alone.

    Attributes
    ----------
    reads_layers: a layer is read whole, through a memory map, before its attention.
    is_direct: blocks are read in extents past the page cache, many at once; otherwise through a
        memory map, of which DRAM holds the pages used last.
    pinned: share of DRAM for slots that each head has of its own; the rest is page cache.
    """

    name: str
    reads_layers: bool = False
    is_direct: bool = False
    pinned: float = 0.0


SYNC_LEVELS = {
    "a": SyncLevel("layer-wise", reads_layers=True),
    "b": SyncLevel("block-wise", is_direct=True),
    "c": SyncLevel("hierarchical"),
    "d": SyncLevel("balanced", pinned=0.75),
}


def sync_level(level: str | None, schedule: str) -> SyncLevel | None:
    """The level called so; ConfigError lists the names, or tells of a schedule that guesses."""
    if level is None:
        return None
    if level not in SYNC_LEVELS:
        known = ", ".join(f"{key!r} ({each.name})" for key, each in SYNC_LEVELS.items())
        raise ConfigError(f"sync={level!r}: expected one of {known}")
    if schedule in SPECULATIVE:
        raise ConfigError(
            f"sync={level!r}, schedule={schedule!r}: a level begins with what the true query "
            "selects: expected another schedule, or no sync="
        )
    return SYNC_LEVELS[level]


def check_stalls(
    stalls: Amounts | None, level: SyncLevel | None, geometry: Geometry, plan: Plan | None
) -> Amounts | None:
    """The stalls themselves, or the slots of a plan that says them for a level that has slots.

    ConfigError if they are of another model, or for another level.
    """
    if stalls is None:
        return None if plan is None or level is None or not level.pinned else plan.pinned
    if level is None or not level.pinned:
        raise ConfigError("stalls=: expected sync='d', the level that gives heads their own slots")
    shape = geometry.layers, geometry.kv_heads
    if np.shape(stalls) != shape or not np.isfinite(stalls).all() or np.min(stalls) < 0:
        raise ConfigError(
            f"stalls of shape {np.shape(stalls)}: expected numbers >= 0, [layers, KV heads], "
            f"{list(shape)}"
        )
    return np.asarray(stalls, np.float64)


def stalls_of(store: BlockStore, segments: Ids) -> Amounts:
    """How often blocks of each of `segments` had to come from the disk, float64 [S]."""
    disk = mapped(store)
    if disk is None:
        raise ConfigError("stalls: nothing counts pages here: make the engine with sync='c' or 'd'")
    owners = store.owners(store.backing)
    pages, _ = page_range(np.arange(len(owners), dtype=np.int32), store.layout.block_bytes)
    waits = disk.asked[pages].astype(np.float64) * (owners >= 0)
    counted = np.bincount(np.maximum(owners, 0), waits, minlength=int(segments.max()) + 1)
    stalls: Amounts = counted[segments].astype(np.float64)
    return stalls


def mapped(store: BlockStore) -> PagedTier | None:
    """The backing tier if it counts its pages, also behind a buffer for writes; None otherwise."""
    disk = store.tiers[store.backing]
    disk = disk.tier if isinstance(disk, WriteBehindTier) else disk
    return disk if isinstance(disk, PagedTier) else None


def fit_dram(
    store: BlockStore, level: SyncLevel, segments: Ids, stalls: Amounts | None, stored: Pointers
) -> None:
    """Let sequences have fair shares of DRAM as slots, and in each heads by how much they stall.

    Slots come as they fill, and go where the shares do; the rest of DRAM is page cache.

    segments: those of int64 stored [layers, sequences, KV heads], the blocks of each. stalls:
    [layers, KV heads] >= 0; None for alike.
    """
    weights = np.ones(stored[:, 0].size) if stalls is None else stalls.reshape(-1)
    memory = store.tiers[1].memory
    assert memory is not None
    room = int(level.pinned * (memory.limit_bytes - memory.used_bytes + memory.slot_bytes))
    slots = min(store.limit(1), room // store.layout.block_bytes)
    quota = np.empty_like(stored)
    for sequence, share in enumerate(fair_shares(stored.sum((0, 2)), slots).tolist()):
        most = stored[:, sequence]
        quota[:, sequence] = share_out(share, weights, most.reshape(-1)).reshape(most.shape)
    store.set_quota(segments, quota.reshape(-1), 1)
    if (total := int(quota.sum())) < store.tiers[1].capacity:
        store.resize(1, total)


def share_out(total: int, weights: Amounts, most: Pointers) -> Pointers:
    """Whole numbers that add up to `total`, in proportion to `weights`, none above its `most`.

    Less than `total` if all have their most. Every row has a tenth of the mean weight at least.
    """
    weights = np.maximum(weights, max(0.1 * weights.mean(), 1e-9))
    shares = np.zeros(len(weights))
    is_open = np.ones(len(weights), np.bool_)
    left = float(min(total, int(most.sum())))
    while left > 0.5 and is_open.any():
        add = left * weights * is_open / (weights * is_open).sum()
        shares = np.minimum(shares + add, most)
        is_open = shares < most
        left = min(total, int(most.sum())) - float(shares.sum())
    whole: Pointers = np.floor(shares + 1e-6).astype(np.int64)
    spare = min(total, int(most.sum())) - int(whole.sum())
    rest = np.argsort(whole - shares, kind="stable")
    rest = rest[whole[rest] < most[rest]][:spare]
    whole[rest] += 1
    return whole
