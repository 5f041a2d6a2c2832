"""Other people's simulators on the same traces: equal on every request, or near.

Run as a script it prints how many requests each policy and libCacheSim decide differently.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierstore.policies import CLOCK, S3FIFO, Belady
from tierstore.policies.replay import POLICIES, leaf_first_order, next_uses, replay
from tierstore.traces.generators import loop, phase_shift, sessions, zipf
from tierstore.traces.readers import read_mooncake

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.policies import QueuePolicy
    from tierstore.traces.requests import RequestTrace

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from simulators import CLOSE, EXACT, Flags, Keys, hits_of

MOONCAKE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl"
MAKERS: dict[str, Callable[[], QueuePolicy]] = {
    **POLICIES,
    "clock, 2 bits": lambda: CLOCK(bits=2),
    "s3-fifo, 2 uses": lambda: S3FIFO(promote_at=2),
    "belady, all in": lambda: Belady(bypass=False),
}

TRACES: dict[str, tuple[Callable[[], RequestTrace], int]] = {
    "zipf 1.0": (lambda: zipf(60_000, 2_000, 1.0, seed=1), 200),
    "zipf 0.7": (lambda: zipf(60_000, 2_000, 0.7, seed=2), 100),
    "zipf 1.2": (lambda: zipf(30_000, 500, 1.2, seed=3), 37),
    "zipf 0.9": (lambda: zipf(100_000, 20_000, 0.9, seed=4), 1_000),
    "loop": (lambda: loop(13_000, 130), 100),
    "phase shift": (phase_shift, 150),
    "sessions": (sessions, 1_500),
    "mooncake": (lambda: read_mooncake(MOONCAKE), 9_139),
}
"""How each trace is made, and a capacity. S3-FIFO of libCacheSim aborts below ten blocks."""


@cache
def requests_of(name: str) -> tuple[RequestTrace, Keys]:
    """A trace and its keys in the order in which a replay requests them."""
    if name == "mooncake" and not MOONCAKE.is_file():
        pytest.skip(f"{MOONCAKE} is not here")
    trace = TRACES[name][0]()
    return trace, trace.keys[leaf_first_order(trace.request_ptr)]


def decisions(trace: str, policy: str) -> tuple[Flags, Flags]:
    """Hits of each request by our policy, and by libCacheSim's."""
    requests, keys = requests_of(trace)
    capacity, future = TRACES[trace][1], next_uses(keys)
    theirs = hits_of(policy, keys, capacity, future if policy.startswith("belady") else None)
    mine = MAKERS[policy]()
    mine.start(requests.distinct, capacity)
    mine.expect(future)
    return mine.request(keys), theirs


@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("trace", TRACES)
def test_every_request_is_decided_as_libcachesim_does(trace: str, policy: str) -> None:
    ours, theirs = decisions(trace, policy)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("policy", CLOSE)
@pytest.mark.parametrize("trace", ["zipf 1.0", "zipf 0.7", "zipf 1.2", "zipf 0.9"])
def test_dialects_are_near_each_other(trace: str, policy: str) -> None:
    ours, theirs = decisions(trace, policy)
    assert abs(float(ours.mean()) - float(theirs.mean())) < 0.02


@pytest.mark.parametrize("policy", ["fifo", "lru"])
def test_weighted_requests_are_decided_as_libcachesim_does(policy: str) -> None:
    keys = zipf(60_000, 2_000, 1.0, seed=5).keys
    sizes = np.random.default_rng(5).integers(1, 200, 2_000)
    mine = MAKERS[policy]()
    mine.start(2_000, 20_000, sizes)
    expected = hits_of(policy, keys, 20_000, sizes=sizes)
    np.testing.assert_array_equal(mine.request(keys), expected)
    assert 0.1 < expected.mean() < 0.9


def test_any_two_policies_differ_on_a_trace_that_shifts() -> None:
    """Else the comparisons above would prove little.

    With equal sizes GDSF is LFU-DA, and so is `WorkloadAware` without categories.
    """
    requests, _ = requests_of("phase shift")
    hits = {
        name: replay(requests, make(), 150).hits
        for name, make in MAKERS.items()
        if name not in ("gdsf", "workload")
    }
    names = sorted(hits)
    differing = {(a, b): float((hits[a] != hits[b]).mean()) for a in names for b in names if a < b}
    differing.pop(("belady", "belady, all in"))
    assert min(differing.values()) >= 0.005, min(differing, key=lambda pair: differing[pair])


@pytest.mark.parametrize("policy", ["fifo", "lru", "belady"])
def test_prefix_hits_are_near_those_of_kvcache_simulator(policy: str) -> None:
    """It counts the second half of the trace in tokens, decides per request, and keeps a tree."""
    pytest.importorskip("kvcache_sim")
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    requests, _ = requests_of("mooncake")
    plan = build_execution_plan(parse_trace_file(str(MOONCAKE), block_size=512), 0.5)
    theirs = simulate_policy(plan, policy.replace("belady", "optimal"), 32_427).hitRate

    half = requests.request_ptr[requests.requests // 2]
    ours = replay(requests, MAKERS[policy](), 32_427).prefix_hits[half:].mean()
    assert abs(float(ours) - theirs) < 0.01, (ours, theirs)


def main() -> None:
    """Print the table of differing decisions."""
    print(f"{'trace':<12} {'requests':>8}", *(f"{name:>16}" for name in EXACT))
    for trace in TRACES:
        differ = [int((a != b).sum()) for a, b in (decisions(trace, p) for p in EXACT)]
        print(f"{trace:<12} {len(requests_of(trace)[1]):>8}", *(f"{n:>16}" for n in differ))


if __name__ == "__main__":
    main()
