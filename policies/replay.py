"""Replays request traces through policies, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.policies.queues import (
    ARC,
    CLOCK,
    FIFO,
    GDSF,
    LFU,
    LFUDA,
    LIRS,
    MRU,
    S3FIFO,
    SIEVE,
    SLRU,
    Belady,
    QueueLRU,
    QueuePolicy,
    TwoQueue,
    WorkloadAware,
    WTinyLFU,
)
from tierstore.policies.queues.base import MOST_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.traces.requests import RequestTrace

Flags = npt.NDArray[np.bool_]

POLICIES: dict[str, Callable[[], QueuePolicy]] = {
    "fifo": FIFO,
    "lru": QueueLRU,
    "mru": MRU,
    "clock": CLOCK,
    "lfu": LFU,
    "lfu-da": LFUDA,
    "gdsf": GDSF,
    "slru": SLRU,
    "2q": TwoQueue,
    "arc": ARC,
    "lirs": LIRS,
    "sieve": SIEVE,
    "s3-fifo": S3FIFO,
    "w-tinylfu": WTinyLFU,
    "workload": WorkloadAware,
    "belady": Belady,
}
"""The policies that can be replayed, each with its defaults, by the name that commands take."""

NEVER = 2**62
"""When a block is used again that is not."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What a policy did with a trace.

    hits: bool [n], for each block of the trace whether it was there. capacity: in blocks, or in
    bytes where the trace has sizes.
    """

    trace: RequestTrace
    capacity: int
    hits: Flags

    @property
    def hit_ratio(self) -> float:
        """Share of the block accesses that were hits; 0 without accesses."""
        return float(self.hits.mean()) if len(self.hits) else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of the block accesses that were hits, and all before them in their chain too."""
        return float(self.prefix_hits.mean()) if len(self.hits) else 0.0

    @cached_property
    def prefix_hits(self) -> Flags:
        """bool [n]: only such a hit saves computing a prefix."""
        ptr = self.trace.request_ptr
        misses = np.concatenate([[0], np.cumsum(~self.hits)])
        before = np.repeat(misses[ptr[:-1]], np.diff(ptr))
        unbroken: Flags = misses[1:] == before
        return unbroken

    @property
    def moved(self) -> int:
        """Bytes of the misses; blocks where the trace does not say sizes."""
        sizes = self.trace.sizes
        return int(np.count_nonzero(~self.hits) if sizes is None else sizes[~self.hits].sum())


def replay(
    trace: RequestTrace,
    policy: QueuePolicy,
    capacity: int,
    *,
    leaf_first: bool = True,
) -> Replay:
    """Get or insert every block of a trace, in order; ConfigError if the policy is in use.

    The policy hears of the sizes, costs and categories that the trace has, and heeds what it can.

    Parameters
    ----------
    capacity: in blocks, or in bytes where the trace has sizes; from 1 to 2**59.
    leaf_first: touch each request's blocks from the last to the first, so that of a chain the root
        is the most recent and leaves go first; False goes from the root on.
    """
    if not isinstance(policy, QueuePolicy):
        raise ConfigError(f"policy={policy!r}: expected a QueuePolicy, for example QueueLRU()")
    check_whole("capacity", capacity, 1, MOST_CAPACITY)
    order = leaf_first_order(trace.request_ptr) if leaf_first else slice(None)
    keys = trace.keys[order]
    policy.start(trace.distinct, capacity, _sizes(trace), _costs(trace), _categories(trace, order))
    if policy.needs_future:
        policy.expect(next_uses(keys))
    hits = np.empty(len(keys), np.bool_)
    hits[order] = policy.request(keys)
    return Replay(trace, capacity, hits)


def footprint(trace: RequestTrace) -> int:
    """Capacity that holds everything: in blocks, or in bytes where the trace has sizes."""
    sizes = _sizes(trace)
    return trace.distinct if sizes is None else int(sizes.sum())


def _sizes(trace: RequestTrace) -> npt.NDArray[np.int64] | None:
    """int64 [distinct], of each key."""
    return None if trace.sizes is None else trace.of_keys(trace.sizes)


def _costs(trace: RequestTrace) -> npt.NDArray[np.float64] | None:
    """float64 [distinct], of each key."""
    return None if trace.costs is None else trace.of_keys(trace.costs)


def _categories(
    trace: RequestTrace, order: npt.NDArray[np.int64] | slice
) -> npt.NDArray[np.int32] | None:
    """int32 [n], numbered from 0, of each access in order."""
    if trace.categories is None:
        return None
    numbers = np.unique(trace.categories, return_inverse=True)[1].astype(np.int32)
    of_accesses: npt.NDArray[np.int32] = np.repeat(numbers, np.diff(trace.request_ptr))[order]
    return of_accesses


def leaf_first_order(request_ptr: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of a trace's blocks, those of each request from the last to the first."""
    lengths = np.diff(request_ptr)
    ends = np.repeat(request_ptr[1:] + request_ptr[:-1] - 1, lengths)
    return ends - np.arange(int(request_ptr[-1]))


def next_uses(keys: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """int64 [n]: the position of the next access of the same key; `NEVER` if there is none."""
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    following = np.full(len(keys), NEVER, np.int64)
    following[order[:-1][again]] = order[1:][again]
    return following
