"""Fair shares: who holds most of a tier gives way first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.interfaces import Access, Demand, EvictionPolicy, Ids, Pointers
from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace
    from tierstore.policies.ranked import RankedPolicy


class FairShares(EvictionPolicy):
    """Lets `policy` choose, among the blocks of those owners that hold most.

    So shares become max-min fair without quotas: an owner that holds no more than an equal share
    loses nothing to others, and what one does not fill is the others'. Among the blocks of a single
    owner `policy` decides as it would alone.

    Parameters
    ----------
    policy: is asked for victims among a part of a domain; a queue over all of it cannot tell.
    """

    def __init__(self, policy: RankedPolicy) -> None:
        self._policy = policy
        self._owner_of: Ids = np.zeros(0, np.int32)

    def own(self, segments: Ids, owners: Ids) -> None:
        """Let blocks of ``segments[i]`` be ``owners[i]``'s, >= 0; unnamed ones are 0's."""
        self._owner_of = np.zeros(len(self._space.blocks), np.int32)
        self._owner_of[segments] = owners

    def bind(self, space: HandleSpace) -> None:
        self._space = space
        self._policy.bind(space)

    def on_access(self, access: Access) -> None:
        self._policy.on_access(access)

    def on_remove(self, handles: Ids) -> None:
        self._policy.on_remove(handles)

    def on_capacity(self, domains: Ids, blocks: Pointers) -> None:
        self._policy.on_capacity(domains, blocks)

    def on_admit(self, handles: Ids, domains: Ids) -> None:
        self._policy.on_admit(handles, domains)

    def on_evict(self, handles: Ids) -> None:
        self._policy.on_evict(handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        self._policy.on_close(segments, domains)

    def victims(self, demand: Demand) -> Ids:
        owners = self._owners(demand.residents)
        if not len(owners) or owners.min() == owners.max():
            return self._policy.victims(demand)
        rows = np.repeat(np.arange(len(demand.domains)), np.diff(demand.row_ptr))
        shape = len(demand.domains), int(owners.max()) + 1
        parts = rows * shape[1] + owners
        held = np.bincount(parts, minlength=shape[0] * shape[1]).reshape(shape)
        able = np.bincount(parts[demand.eligible], minlength=held.size).reshape(shape)
        if (able.sum(1) < demand.need).any():
            return self._policy.victims(demand)
        held += self._coming(demand, shape)
        kept = held.sum(1) - demand.need
        shares = [fair_shares(*each) for each in zip(held, kept.tolist(), held - able, strict=True)]
        need = (held - np.array(shares)).reshape(-1)
        return self._policy.victims(_part_of(demand, parts, need, shape[1]))

    def _coming(self, demand: Demand, shape: tuple[int, int]) -> Pointers:
        """Blocks of each owner that come in, [domains, owners]; none where domains are several."""
        owners = self._owners(demand.incoming if shape[0] == 1 else demand.incoming[:0])
        coming = np.bincount(owners[owners < shape[1]], minlength=shape[0] * shape[1])
        return coming.reshape(shape)

    def _owners(self, residents: Ids) -> Ids:
        if len(self._owner_of) < len(self._space.blocks):
            more = len(self._space.blocks) - len(self._owner_of)
            self._owner_of = np.concatenate([self._owner_of, np.zeros(more, np.int32)])
        owners: Ids = self._owner_of[self._space.owner_segment[residents // CHUNK]]
        return owners


def _part_of(demand: Demand, parts: Pointers, need: Pointers, width: int) -> Demand:
    """The same demand, of those parts of domains that have a `need`; `width` parts a domain."""
    gives = np.flatnonzero(need)
    chosen = np.flatnonzero(need[parts])
    chosen = chosen[np.argsort(parts[chosen], kind="stable")]
    counts = np.bincount(parts[chosen], minlength=len(need))[gives]
    return Demand(
        demand.domains[gives // width], np.concatenate([[0], np.cumsum(counts)]),
        demand.residents[chosen], demand.eligible[chosen], need[gives], demand.access,
    )  # fmt: skip


def fair_shares(wanted: Pointers, total: int, least: Pointers | int = 0) -> Pointers:
    """Max-min fair shares, int64 [n]: as much as wanted, or as much as anybody gets.

    So none gets more by another's wanting more than all can have, and what one does not want is
    the others'. Everybody gets its `least`, however, of which all together are within the total.
    """
    low, high = 0, int(wanted.max(initial=0))
    while low < high:
        level = (low + high + 1) // 2
        if np.clip(level, least, wanted).sum() <= total:
            low = level
        else:
            high = level - 1
    shares: Pointers = np.clip(low, least, wanted)
    order = np.argsort(wanted, kind="stable")[::-1]
    order = order[(shares[order] == low) & (wanted[order] > low)]
    shares[order[: total - int(shares.sum())]] += 1
    return shares
