"""Whoever holds most of a tier gives way first, as far as anything of theirs may leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.interfaces import Access, Demand
from tierstore.memory import unlimited
from tierstore.policies import LRU, FairShares
from tierstore.policies.fair import fair_shares
from tierstore.testing import PolicyTests

if TYPE_CHECKING:
    from tierstore.interfaces import Ids


class TestFairShares(PolicyTests):
    """All blocks are one owner's."""

    def make_policy(self) -> FairShares:
        return FairShares(LRU())


class _Owned(FairShares):
    """Every segment is an owner of its own."""

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._owner_of = np.arange(64, dtype=np.int32)


class TestFairSharesOfSegments(PolicyTests):
    """Among owners that hold equally much, numbers decide."""

    sees_handles = True

    def make_policy(self) -> FairShares:
        return _Owned(LRU())


people = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=7)


@given(people, st.integers(0, 300))
def test_nobody_gets_more_while_another_wants_more_and_has_less(
    rows: list[tuple[int, int]], beyond: int
) -> None:
    least = np.array([min(each) for each in rows], np.int64)
    wanted = np.array([max(each) for each in rows], np.int64)
    total = int(least.sum()) + beyond
    shares = fair_shares(wanted, total, least)
    assert shares.sum() == min(total, wanted.sum())
    assert (shares >= least).all()
    assert (shares <= wanted).all()
    for poor, most, want in zip(shares.tolist(), least.tolist(), wanted.tolist(), strict=True):
        for rich, floor in zip(shares.tolist(), least.tolist(), strict=True):
            assert most <= poor == want or rich == floor or rich <= poor + 1


@given(
    st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_what_is_left_is_max_min_fair_and_the_oldest_of_each_leave(
    owned: list[list[bool]], seed: int, data: st.DataObject
) -> None:
    """Blocks of some owners, each of which may leave or not, in any order in the tier."""
    space, policy = HandleSpace(unlimited()), FairShares(LRU())
    policy.bind(space)
    segments = space.open(len(owned))
    handles = [space.extend(segments[i : i + 1], len(own))[0] for i, own in enumerate(owned)]
    policy.own(segments, np.arange(len(owned), dtype=np.int32))
    random = np.random.default_rng(seed)
    all_handles: Ids = random.permutation(np.concatenate(handles)).astype(np.int32)
    used = random.permutation(all_handles)
    for step, handle in enumerate(used.tolist()):
        one = np.array([handle], np.int32)
        policy.on_access(Access(np.array([0, 1]), one, np.zeros(1, np.float32), step))
    may_leave = {
        int(handle): able
        for own, mine in zip(owned, handles, strict=True)
        for handle, able in zip(mine, own, strict=True)
    }
    eligible = np.array([may_leave[handle] for handle in all_handles.tolist()], np.bool_)
    need = data.draw(st.integers(0, int(eligible.sum())))
    idle = Access(np.zeros(1, np.int64), used[:0], np.zeros(0, np.float32), len(used))
    demand = Demand(
        np.zeros(1, np.int32), np.array([0, len(all_handles)]), all_handles, eligible,
        np.array([need]), idle,
    )  # fmt: skip
    gone = set(policy.victims(demand).tolist())
    assert len(gone) == need
    assert all(may_leave[handle] for handle in gone)
    left = [len(set(mine.tolist()) - gone) for mine in handles]
    for giver, mine in enumerate(handles):
        own = [handle for handle in used.tolist() if handle in mine and may_leave[handle]]
        given_up = [handle for handle in own if handle in gone]
        assert given_up == own[: len(given_up)], "the oldest leave first"
        for other, theirs in enumerate(handles):
            could = any(may_leave[handle] for handle in set(theirs.tolist()) - gone)
            assert not given_up or not could or left[other] <= left[giver] + 1
