"""A guard against tests that cannot tell policies apart."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from tierstore.testing.policy_cache import PolicyCache, next_uses
from tierstore.testing.policy_replays import ReplayedPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from tierstore.interfaces import EvictionPolicy

LEAST_SHARE = 0.005
LEAST_TURNS = 10


def assert_distinct(
    policies: Mapping[str, Callable[[], EvictionPolicy]], trace: Sequence[int], capacity: int
) -> dict[tuple[str, str], float]:
    """The share of the requests on which two policies differ, hit or miss, for each pair.

    AssertionError if it is below 0.5 % for any pair, or if SIEVE's hand goes round the cache less
    than 10 times: until it has gone round once, SIEVE decides as LFU does. A test on such a trace
    proves nothing. `trace` has keys from 0 on; steps have random scores for policies that heed
    them.
    """
    turns = sieve_turns(trace, capacity)
    assert turns >= LEAST_TURNS, (
        f"SIEVE's hand goes round {turns} times, {LEAST_TURNS} are expected: take a longer trace "
        "or less capacity"
    )
    hits = {name: _hits(make(), trace, capacity) for name, make in policies.items()}
    shares = {(a, b): float((hits[a] != hits[b]).mean()) for a, b in combinations(hits, 2)}
    alike = [
        f"{a} and {b} ({share:.3%})" for (a, b), share in shares.items() if share < LEAST_SHARE
    ]
    assert not alike, (
        f"the trace does not tell apart {', '.join(alike)}: expected {LEAST_SHARE:.1%} of its "
        "requests to differ"
    )
    return shares


def _hits(policy: EvictionPolicy, trace: Sequence[int], capacity: int) -> npt.NDArray[np.bool_]:
    keys = max(trace) + 1
    if isinstance(policy, ReplayedPolicy):
        policy.start(keys, capacity)
        if policy.needs_future:
            policy.expect(np.array(next_uses(trace), np.int64))
        return policy.request(np.array(trace, np.int32))
    return np.array(PolicyCache(policy, keys, capacity).run(trace, 0).hits)


def sieve_turns(trace: Sequence[int], capacity: int) -> int:
    """How often SIEVE's hand goes on from the newest entry to the oldest."""
    queue: list[int] = []
    used: set[int] = set()
    hand = turns = 0
    for key in trace:
        if key in used or key in queue:
            used.add(key)
            continue
        if len(queue) == capacity:
            while queue[hand] in used:
                used.remove(queue[hand])
                hand += 1
                if hand == capacity:
                    hand, turns = 0, turns + 1
            del queue[hand]
            if hand == len(queue):
                hand, turns = 0, turns + 1
        queue.append(key)
    return turns
