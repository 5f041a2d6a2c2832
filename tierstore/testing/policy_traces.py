"""What every eviction policy must do with a trace of requests."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tierstore.testing.laws import trace_law
from tierstore.testing.policy_cache import SEGMENTS, PolicyCache, fewest_misses
from tierstore.testing.policy_machine import PolicyMachine
from tierstore.testing.policy_process import evicted_elsewhere

if TYPE_CHECKING:
    from tierstore.interfaces import EvictionPolicy

KEYS = 12
Requests = list[int]


def skewed(seed: int, length: int = 80) -> Requests:
    """A few keys requested often and all sometimes; which ones changes half way."""
    random = np.random.default_rng(seed)
    drawn = np.minimum(random.geometric(0.25, length), KEYS) - 1
    drawn[length // 2 :] = (drawn[length // 2 :] * 5 + 3) % KEYS
    keys: Requests = drawn.tolist()
    return keys


seeds = st.integers(0, 2**32 - 1)
requests = st.one_of(seeds.map(skewed), st.lists(st.integers(0, KEYS - 1), max_size=60))
capacities = st.integers(1, KEYS - 1)


class PolicyTraceTests(ABC):
    """A cache that drives the policy as a store does checks each of its answers on the way.

    Attributes
    ----------
    is_stack: whether what a cache holds is always held by a larger one, too (LRU).
    sees_handles: whether decisions depend on the numbers that blocks have, as where a sample of the
        blocks is followed, or blocks learn from the one before them; then other numbers may have
        other victims.
    """

    is_stack: ClassVar[bool] = False
    sees_handles: ClassVar[bool] = False

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new policy; each call makes an equal one (the same seed, say)."""

    def cache(self, capacity: int) -> PolicyCache:
        return PolicyCache(self.make_policy(), KEYS, capacity)

    @trace_law
    @given(requests, capacities, seeds)
    def test_no_policy_misses_less_than_the_best_choice(
        self, trace: Requests, capacity: int, seed: int
    ) -> None:
        hits, evicted = self.cache(capacity).run(trace, seed)
        misses = hits.count(False)
        assert misses >= fewest_misses(trace, capacity)
        assert len(evicted) == max(0, misses - capacity)

    @trace_law
    @given(requests, capacities, seeds)
    def test_hits_of_a_smaller_cache_are_hits_of_a_larger_one(
        self, trace: Requests, capacity: int, seed: int
    ) -> None:
        if not self.is_stack:
            pytest.skip("is_stack is False: more capacity may have more misses")
        smaller = self.cache(capacity).run(trace, seed).hits
        larger = self.cache(capacity + 1).run(trace, seed).hits
        assert all(more or not less for less, more in zip(smaller, larger, strict=True))

    def test_the_hash_seed_of_the_process_does_not_matter(self) -> None:
        expected = self.cache(5).run(skewed(1, 300), 1).evicted
        assert evicted_elsewhere(type(self), skewed(1, 300), 5) == expected

    @trace_law
    @given(requests, capacities, seeds)
    def test_a_trace_that_fits_misses_each_key_once(
        self, trace: Requests, capacity: int, seed: int
    ) -> None:
        trace = [key % capacity for key in trace]
        hits, evicted = self.cache(capacity).run(trace, seed)
        assert hits.count(False) == len(set(trace))
        assert evicted == []

    def test_one_key_misses_once(self) -> None:
        assert self.cache(1).run([7] * 20, 0).hits == [False] + [True] * 19

    def test_one_block_holds_the_last_key(self) -> None:
        trace = skewed(0)
        hits = self.cache(1).run(trace, 0).hits
        assert hits == [False, *(a == b for a, b in pairwise(trace))]

    def test_keys_that_never_come_back_never_hit(self) -> None:
        cache = PolicyCache(self.make_policy(), 100, 5)
        hits, evicted = cache.run(range(100), 0)
        assert not any(hits)
        assert len(evicted) == 95

    def test_what_is_held_hits_for_ever(self) -> None:
        cache = self.cache(6)
        cache.run([*range(KEYS), *range(KEYS)], 0)
        hits, evicted = cache.run(cache.residents * 20, 0)
        assert all(hits)
        assert evicted == []

    @trace_law
    @given(
        requests,
        capacities,
        seeds,
        st.permutations(range(SEGMENTS)),
        st.permutations(range(KEYS // SEGMENTS)),
    )
    def test_numbers_of_blocks_do_not_matter(
        self, trace: Requests, capacity: int, seed: int, segments: list[int], blocks: list[int]
    ) -> None:
        if self.sees_handles:
            pytest.skip("sees_handles is True: other numbers may have other victims")
        renumbered = PolicyCache(self.make_policy(), KEYS, capacity, (segments, blocks))
        assert renumbered.run(trace, seed) == self.cache(capacity).run(trace, seed)

    @trace_law
    @given(requests, capacities, seeds, st.integers(0, 80))
    def test_a_policy_pickled_in_the_middle_goes_on_as_before(
        self, trace: Requests, capacity: int, seed: int, cut: int
    ) -> None:
        """With its space, as in a copy of the whole cache."""
        cache = self.cache(capacity)
        before = cache.run(trace[:cut], seed)
        after = pickle.loads(pickle.dumps(cache)).run(trace[cut:], seed)
        whole = self.cache(capacity).run(trace, seed)
        assert before.hits + after.hits == whole.hits
        assert before.evicted + after.evicted == whole.evicted

    @trace_law
    @given(requests, requests, capacities, seeds)
    def test_a_domain_that_ended_leaves_nothing_behind(
        self, before: Requests, trace: Requests, capacity: int, seed: int
    ) -> None:
        """A new one with its number, and with new segments and blocks, is like the first ever."""
        again, first = self.cache(capacity), self.cache(capacity)
        again.run(before, seed)
        again.start_over()
        first.skip(len(before))
        assert again.run(trace, seed) == first.run(trace, seed)

    def test_anything_may_happen_at_any_moment(self) -> None:
        suite = self

        class Machine(PolicyMachine):
            def make_policy(self) -> EvictionPolicy:
                return suite.make_policy()

        run_state_machine_as_test(Machine, settings=settings(trace_law, stateful_step_count=30))
