"""What every policy must do that replays traces of requests by itself."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tierstore.testing.laws import trace_law
from tierstore.testing.policies import PolicyTests
from tierstore.testing.policy_cache import PolicyCache, fewest_misses, next_uses
from tierstore.testing.policy_traces import KEYS, Requests, capacities, requests, seeds, skewed
from tierstore.testing.policy_work import in_python, lines_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import EvictionPolicy, Ids

_SIZES = np.array([1, 2, 3, 5, 1, 2, 9, 1, 4, 2, 1, 6])


@runtime_checkable
class ReplayedPolicy(Protocol):
    """A policy that keeps its own account of what is resident; see `QueuePolicy`."""

    needs_future: bool
    loops: Any

    def start(self, keys: int, capacity: int, size: npt.NDArray[np.int64] | None = None) -> None:
        """Begin with nothing."""

    def expect(self, future: npt.NDArray[np.int64]) -> None:
        """Say when the key of each request is requested again."""

    def request(self, keys: Ids) -> npt.NDArray[np.bool_]:
        """Get or insert each key; whether it was there."""


class ReplayTests(ABC):
    """Inherit, and make a policy that has `start` and `request`; `QueuePolicy` has them.

    Attributes
    ----------
    always_admits: whether what misses comes in, unless it is larger than the capacity.
    """

    always_admits: ClassVar[bool] = True

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new policy; each call makes an equal one (the same seed, say)."""

    def started(
        self,
        trace: Sequence[int],
        capacity: int,
        sizes: npt.NDArray[np.int64] | None = None,
        keys: int = KEYS,
    ) -> ReplayedPolicy:
        """A policy about to replay a trace."""
        policy = self.make_policy()
        assert isinstance(policy, ReplayedPolicy)
        policy.start(keys, capacity, sizes)
        if policy.needs_future:
            # `resident` makes one request more.
            policy.expect(np.array([*next_uses(trace), len(trace)], np.int64))
        return policy

    def hits(
        self, trace: Requests, capacity: int, sizes: npt.NDArray[np.int64] | None = None
    ) -> list[bool]:
        return request(self.started(trace, capacity, sizes), trace)

    @trace_law
    @given(requests, capacities)
    def test_no_replay_misses_less_than_the_best_choice(
        self, trace: Requests, capacity: int
    ) -> None:
        assert self.hits(trace, capacity).count(False) >= fewest_misses(trace, capacity)

    @trace_law
    @given(requests, capacities, st.integers(0, 80))
    def test_a_replay_goes_on_as_before_in_parts_and_after_pickling(
        self, trace: Requests, capacity: int, cut: int
    ) -> None:
        policy = self.started(trace, capacity)
        before = request(policy, trace[:cut])
        policy = pickle.loads(pickle.dumps(policy))
        assert before + request(policy, trace[cut:]) == self.hits(trace, capacity)

    @trace_law
    @given(requests, capacities, st.permutations(range(KEYS)))
    def test_numbers_of_keys_do_not_matter(
        self, trace: Requests, capacity: int, number_of: list[int]
    ) -> None:
        renumbered = [number_of[key] for key in trace]
        assert self.hits(renumbered, capacity) == self.hits(trace, capacity)

    @trace_law
    @given(requests, capacities)
    def test_sizes_of_one_are_like_none(self, trace: Requests, capacity: int) -> None:
        unweighted = self.hits(trace, capacity)
        assert self.hits(trace, capacity, np.full(KEYS, 1)) == unweighted

    @trace_law
    @given(st.lists(st.integers(0, KEYS - 1), max_size=25), st.integers(1, 12))
    def test_residents_never_weigh_more_than_the_capacity(
        self, trace: Requests, capacity: int
    ) -> None:
        """And what hits is just what was resident; what is too large lets nobody leave."""
        policy = self.started(trace, capacity, _SIZES)
        held: set[int] = set()
        for key in trace:
            assert request(policy, [key]) == [key in held]
            before, held = held, resident(policy)
            assert _SIZES[list(held)].sum() <= capacity
            assert held <= before | {key}
            if _SIZES[key] > capacity or key in before:
                assert held == before
            elif self.always_admits:
                assert key in held

    @trace_law
    @given(requests, capacities)
    def test_a_replay_that_fits_misses_each_key_once(self, trace: Requests, capacity: int) -> None:
        trace = [key % capacity for key in trace]
        assert self.hits(trace, capacity).count(False) == len(set(trace))

    def test_replays_of_one_key_of_one_block_and_of_new_keys_only(self) -> None:
        assert self.hits([7] * 20, 1) == [False] + [True] * 19
        trace = skewed(0)
        if self.always_admits:
            changes = [a == b for a, b in pairwise(trace)]
            assert self.hits(trace, 1) == [False, *changes]
        new = list(range(100))
        assert not any(request(self.started(new, 5, keys=100), new))

    def test_the_work_for_a_request_does_not_grow_with_the_capacity(self) -> None:
        """Counted in lines of Python that run; a heap may take a level or three more."""
        small, large = self._work(1_000), self._work(10_000)
        assert large < 1.6 * small, f"{small:.0f} lines a request, and {large:.0f} with ten times"

    def _work(self, capacity: int) -> float:
        """Lines run for each of 20,000 requests, half of which miss, after a long warm-up."""
        random = np.random.default_rng(0)
        count, keys = 20_000, 8 * capacity
        trace = (keys * random.random(4 * keys + count) ** 4).astype(np.int32)
        policy = self.started(trace.tolist(), capacity, keys=keys)
        policy.request(trace[:-count])
        policy.loops = type(policy.loops)(*map(in_python, policy.loops))
        return lines_run(lambda: policy.request(trace[-count:])) / count


class QueuePolicyTests(PolicyTests, ReplayTests):
    """Inherit, and make a `QueuePolicy` that serves both replays and stores."""

    @trace_law
    @given(requests, capacities, seeds)
    def test_a_store_decides_as_a_replay_does(
        self, trace: Requests, capacity: int, seed: int
    ) -> None:
        store = PolicyCache(self.make_policy(), KEYS, capacity).run(trace, seed)
        assert store.hits == self.hits(trace, capacity)


def request(policy: ReplayedPolicy, keys: Sequence[int]) -> list[bool]:
    hits: list[bool] = policy.request(np.array(keys, np.int32)).tolist()
    return hits


def resident(policy: ReplayedPolicy) -> set[int]:
    """Keys that would hit now, asked of copies."""
    return {key for key in range(KEYS) if request(copy.deepcopy(policy), [key]) == [True]}
