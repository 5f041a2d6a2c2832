"""What may happen to a policy between two steps, in any order."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.errors import PolicyError
from tierstore.testing.policy_cache import SEGMENTS, PolicyCache

if TYPE_CHECKING:
    from tierstore.interfaces import EvictionPolicy

_KEYS = 12
_keys = st.integers(0, _KEYS - 1)
_seeds = st.integers(0, 2**32 - 1)


class PolicyMachine(RuleBasedStateMachine):
    """Two caches live through the same; one is asked for victims that then stay, and is pickled.

    They must go on alike: asking changes nothing, whether the policy can answer or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.other = (PolicyCache(self.make_policy(), _KEYS, 5) for _ in range(2))
        self.named: list[int] = []

    def make_policy(self) -> EvictionPolicy:
        """A new policy; each call makes an equal one."""
        raise NotImplementedError

    @property
    def both(self) -> tuple[PolicyCache, PolicyCache]:
        return self.asked, self.other

    @rule(
        keys=st.lists(_keys, min_size=1, max_size=3, unique=True),
        seed=_seeds,
        scored=st.booleans(),
    )
    def request(self, keys: list[int], seed: int, scored: bool) -> None:
        it = self.other
        missing = [key for key in keys if key not in it.residents]
        over = len(it.residents) + len(missing) - it.capacity
        if over <= len(it.may_leave(keys)):
            for cache in self.both:
                cache.request(keys, cache.scores(seed) if scored else None)

    @precondition(lambda self: self.other.residents)
    @rule(which=st.integers(0, _KEYS))
    def pin(self, which: int) -> None:
        key = self.other.residents[which % len(self.other.residents)]
        for cache in self.both:
            cache.pinned.add(key)

    @rule()
    def pin_everything(self) -> None:
        for cache in self.both:
            cache.pinned |= set(cache.residents)

    @rule(which=st.sets(_keys))
    def unpin(self, which: set[int]) -> None:
        for cache in self.both:
            cache.pinned -= which

    @rule(segment=st.integers(0, SEGMENTS - 1))
    def remove(self, segment: int) -> None:
        for cache in self.both:
            cache.remove(segment)

    @rule(capacity=st.integers(1, _KEYS))
    def resize(self, capacity: int) -> None:
        for cache in self.both:
            cache.resize(max(capacity, len(cache.pinned)))

    @precondition(lambda self: not set(self.other.may_leave()) <= set(self.named))
    @rule(which=st.integers(0, _KEYS))
    def drop(self, which: int) -> None:
        """The store lets blocks go that nobody named, when a tier shrinks."""
        unnamed = [key for key in self.other.may_leave() if key not in self.named]
        for cache in self.both:
            cache.drop(unnamed[which % len(unnamed)])

    @rule(count=st.integers(0, _KEYS))
    def evict(self, count: int) -> None:
        for cache in self.both:
            cache.evict(min(count, len(cache.may_leave())))

    @rule(count=st.integers(0, _KEYS))
    def ask(self, count: int) -> None:
        """Victims that stay after all, twice the same ones."""
        able = len(self.asked.may_leave())
        for each in {min(1, able), able // 2}:
            assert self.asked.victims(each) == self.asked.victims(each)
        self.named = self.asked.victims(min(count, able))
        assert self.asked.victims(min(count, able)) == self.named

    @rule(more=st.integers(1, 3))
    def ask_too_much(self, more: int) -> None:
        with pytest.raises(PolicyError):
            self.asked.victims(len(self.asked.may_leave()) + more)

    @rule()
    def pickle(self) -> None:
        self.asked = pickle.loads(pickle.dumps(self.asked))

    @invariant()
    def they_go_on_alike(self) -> None:
        assert self.asked.evicted == self.other.evicted
        assert self.asked.residents == self.other.residents
        assert len(self.other.residents) <= self.other.capacity

    def teardown(self) -> None:
        """What is left leaves in the same order, too."""
        for cache in self.both:
            cache.pinned.clear()
            for _ in range(len(cache.residents)):
                cache.evict(1)
        assert self.asked.evicted == self.other.evicted
