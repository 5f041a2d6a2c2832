"""Every queue policy against an independent one, request by request and victim by victim."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_references import REFERENCES, Reference
from policy_references import WorkloadAware as WorkloadReference

from tierstore.directory import HandleSpace
from tierstore.errors import ConfigError, PolicyError
from tierstore.interfaces import Access, Demand, Ids
from tierstore.memory import unlimited
from tierstore.policies import (
    CLOCK,
    GDSF,
    LRU,
    S3FIFO,
    Belady,
    QueuePolicy,
    WorkloadAware,
    WTinyLFU,
)
from tierstore.policies.replay import POLICIES, next_uses, replay
from tierstore.testing.policy_cache import PolicyCache
from tierstore.traces.requests import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS: dict[str, Callable[[], QueuePolicy]] = {
    **POLICIES,
    "clock, 2 bits": lambda: CLOCK(bits=2),
    "s3-fifo, 2 uses": lambda: S3FIFO(promote_at=2),
    "w-tinylfu, wide": lambda: WTinyLFU(window=0.5),
    "belady, all in": lambda: Belady(bypass=False),
}
ONLINE = [name for name in MAKERS if not name.startswith("belady")]
KEYS = 24

traces = st.one_of(
    st.lists(st.integers(0, KEYS - 1), max_size=120),
    st.lists(st.integers(0, 7), max_size=60),
    # Runs and returns: what ghosts and stacks are for.
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8)), max_size=24).map(
        lambda runs: [first + i for first, length in runs for i in range(length)]
    ),
)
capacities = st.integers(1, 15)
size_lists = st.lists(st.integers(1, 9), min_size=KEYS, max_size=KEYS)


def hits_of(
    name: str, trace: list[int], capacity: int, sizes: list[int] | None = None
) -> list[bool]:
    policy, keys = MAKERS[name](), np.array(trace, np.int32)
    policy.start(KEYS, capacity, None if sizes is None else np.array(sizes, np.int64))
    policy.expect(next_uses(keys))
    hits: list[bool] = policy.request(keys).tolist()
    return hits


def test_every_policy_that_can_be_replayed_has_a_reference() -> None:
    assert set(MAKERS) == set(REFERENCES)


@pytest.mark.parametrize("name", MAKERS)
@given(traces, capacities)
def test_each_request_hits_where_the_reference_does(
    name: str, trace: list[int], capacity: int
) -> None:
    assert hits_of(name, trace, capacity) == REFERENCES[name](capacity).run(trace)


@pytest.mark.parametrize("name", MAKERS)
def test_each_request_of_long_traces_hits_where_the_reference_does(name: str) -> None:
    """Skewed, so that counters saturate, hands wrap and counts are halved."""
    for seed, capacity in enumerate([1, 2, 3, 7, 10, 12, 15]):
        random = np.random.default_rng(seed)
        trace = np.minimum(random.zipf(1.3, 1500) - 1 + random.integers(0, 3, 1500), KEYS - 1)
        expected = REFERENCES[name](capacity).run(trace.tolist())
        assert hits_of(name, trace.tolist(), capacity) == expected
        assert any(expected)


@pytest.mark.parametrize("name", MAKERS)
@given(traces, st.integers(1, 40), size_lists)
def test_weighted_requests_hit_where_the_reference_does(
    name: str, trace: list[int], capacity: int, sizes: list[int]
) -> None:
    expected = REFERENCES[name](capacity, dict(enumerate(sizes))).run(trace)
    assert hits_of(name, trace, capacity, sizes) == expected


@pytest.mark.parametrize("name", MAKERS)
@given(traces, capacities, st.integers(0, 120))
def test_a_policy_pickled_in_the_middle_goes_on_as_before(
    name: str, trace: list[int], capacity: int, cut: int
) -> None:
    keys = np.array(trace, np.int32)
    policy = MAKERS[name]()
    policy.start(KEYS, capacity)
    policy.expect(next_uses(keys))
    before = policy.request(keys[:cut])
    later = pickle.loads(pickle.dumps(policy)).request(keys[cut:])
    assert [*before, *later] == hits_of(name, trace, capacity)


@pytest.mark.parametrize("name", MAKERS)
@given(traces, capacities, st.permutations(range(KEYS)))
def test_names_of_keys_do_not_matter(
    name: str, trace: list[int], capacity: int, renamed: list[int]
) -> None:
    other = [renamed[key] for key in trace]
    assert hits_of(name, other, capacity) == hits_of(name, trace, capacity)


@given(
    traces,
    st.integers(1, 40),
    size_lists,
    st.lists(st.sampled_from([0.25, 1.0, 1.5, 7.0]), min_size=KEYS, max_size=KEYS),
    st.lists(st.integers(0, 3), min_size=1, max_size=17),
    st.sampled_from([0.5, 0.9, 0.9999, 1.0]),
)
def test_requests_of_categories_hit_where_the_reference_does(
    trace: list[int],
    capacity: int,
    sizes: list[int],
    costs: list[float],
    pattern: list[int],
    decay: float,
) -> None:
    """In two parts, so that what was learned is kept from one to the next."""
    categories = [pattern[i % len(pattern)] for i in range(len(trace))]
    reference = WorkloadReference(capacity, dict(enumerate(sizes)), decay=decay)
    reference.categories, reference.costs = categories, costs
    policy = WorkloadAware(decay)
    policy.start(KEYS, capacity, np.array(sizes), np.array(costs), np.array(categories, np.int32))
    keys, cut = np.array(trace, np.int32), len(trace) // 3
    hits = [*policy.request(keys[:cut]), *policy.request(keys[cut:])]
    assert hits == reference.run(trace)


def test_long_requests_of_categories_hit_where_the_reference_does() -> None:
    for seed, capacity in enumerate([3, 7, 10, 15]):
        random = np.random.default_rng(seed)
        trace = np.minimum(random.zipf(1.3, 1500) - 1 + random.integers(0, 3, 1500), KEYS - 1)
        categories = ((trace % 3 > 0) + random.integers(0, 2, 1500)).astype(np.int32)
        reference = WorkloadReference(capacity, decay=0.99)
        reference.categories = categories.tolist()
        policy = WorkloadAware(0.99)
        policy.start(KEYS, capacity, category=categories)
        hits = policy.request(trace.astype(np.int32)).tolist()
        assert hits == reference.run(trace.tolist())
        assert hits != hits_of("gdsf", trace.tolist(), capacity)


@given(traces, st.integers(1, 40), size_lists)
def test_without_categories_workload_is_gdsf(
    trace: list[int], capacity: int, sizes: list[int]
) -> None:
    """In a store, where it hears of none, see `test_policies`."""
    assert hits_of("workload", trace, capacity, sizes) == hits_of("gdsf", trace, capacity, sizes)


@given(st.lists(st.integers(0, 11), max_size=80), st.integers(1, 7))
def test_in_a_store_workload_is_gdsf_with_unit_costs(trace: list[int], capacity: int) -> None:
    runs = [PolicyCache(make(), 12, capacity).run(trace) for make in (WorkloadAware, GDSF)]
    assert runs[0] == runs[1]


def test_a_replay_tells_categories_whatever_their_numbers() -> None:
    """What calls bring in is never used again, so it leaves before what chats did.

    (a) Chats (-5) use 1 and 2 again and again, calls (10**12) new blocks. (b) A chat brings in 3,
    calls bring in more than fits. (c) LRU has let go of 3 then, and so has GDSF.
    """
    chats = [1, 2] * 10
    calls = list(range(100, 120))
    blocks = [block for pair in zip(chats, calls, strict=True) for block in pair]
    blocks += [3, *range(200, 206), 3]
    kinds = [-5, 10**12] * 20 + [-5, *[10**12] * 6, -5]
    trace = RequestTrace(
        np.arange(len(blocks) + 1), np.array(blocks, np.uint64), categories=np.array(kinds)
    )
    last = {name: bool(replay(trace, POLICIES[name](), 6).hits[-1]) for name in POLICIES}
    assert last["workload"]
    assert not last["gdsf"]
    assert not last["lru"]


def test_categories_follow_the_order_of_touches() -> None:
    """Each access has the category of its request, from leaf to root and from root to leaf."""
    random = np.random.default_rng(3)
    lengths = random.integers(0, 6, 400)
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    blocks = random.integers(0, KEYS, ptr[-1]).astype(np.uint64)
    kinds = random.integers(0, 3, 400)
    trace = RequestTrace(ptr, blocks, categories=kinds)
    for step in (-1, 1):
        order = [
            i for first, end in pairwise(ptr.tolist()) for i in list(range(first, end))[::step]
        ]
        reference = WorkloadReference(9)
        reference.categories = [int(np.searchsorted(ptr, i, "right") - 1) for i in order]
        reference.categories = [int(kinds[request]) for request in reference.categories]
        expected = reference.run(trace.keys[order].tolist())
        found = replay(trace, WorkloadAware(), 9, leaf_first=step < 0).hits[order]
        assert found.tolist() == expected


@pytest.mark.parametrize("decay", [0.0, -0.1, 1.1])
def test_a_decay_that_forgets_all_or_grows_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=rf"decay={decay}: expected a factor in \(0, 1\]"):
        WorkloadAware(decay)


class Event(NamedTuple):
    what: str
    key: int


events = st.lists(
    st.builds(
        Event,
        st.sampled_from(["request"] * 8 + ["remove", "pin", "unpin", "ask"]),
        st.integers(0, KEYS - 1) | st.integers(0, 8),
    ),
    max_size=150,
)


class Store:
    """One domain that a policy serves as it would in a store, block by block."""

    def __init__(self, policy: QueuePolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.space = HandleSpace(unlimited())
        policy.bind(self.space)
        # The domain is not number 0, and handles are not those of the first chunk.
        self.domain = np.array([3], np.int32)
        self.space.extend(self.space.open(1), 70)
        self.handles = self.space.extend(self.space.open(1), KEYS)[0]
        self.policy.on_capacity(self.domain, np.array([capacity]))
        self.residents: list[int] = []
        self.pinned: set[int] = set()
        self.evicted: list[int] = []
        self.step = 0

    def access(self, keys: list[int]) -> Access:
        self.step += 1
        handles = self.handles[keys].astype(np.int32)
        return Access(np.array([0, len(keys)]), handles, np.zeros(len(keys), np.float32), self.step)

    def victims(self, need: int) -> Ids:
        """The residents come in an order of their own."""
        held = sorted(self.residents)
        residents = self.handles[held].astype(np.int32)
        eligible = np.array([key not in self.pinned for key in held], np.bool_)
        demand = Demand(
            self.domain, np.array([0, len(held)]), residents, eligible, np.array([need]),
            self.access([]),
        )  # fmt: skip
        return self.policy.victims(demand)

    def key_of(self, handle: int) -> int:
        return int(np.flatnonzero(self.handles == handle)[0])

    def request(self, key: int) -> bool:
        self.policy.on_access(self.access([key]))
        if key in self.residents:
            return True
        if len(self.residents) == self.capacity:
            victims = self.victims(1)
            self.policy.on_evict(victims)
            self.evicted.append(self.key_of(victims[0]))
            self.residents.remove(self.evicted[-1])
        self.residents.append(key)
        self.policy.on_admit(self.handles[[key]].astype(np.int32), self.domain)
        return False

    def remove(self, key: int) -> None:
        self.policy.on_remove(self.handles[[key]].astype(np.int32))
        if key in self.residents:
            self.residents.remove(key)
            self.pinned.discard(key)

    def pin(self, key: int) -> None:
        """One resident stays free to go."""
        if key in self.residents and len(self.pinned) < self.capacity - 1:
            self.pinned.add(key)

    def unpin(self, key: int) -> None:
        self.pinned.discard(key)

    def ask(self, key: int) -> None:
        """Victims are asked for, and then nothing comes of it."""
        able = [key for key in self.residents if key not in self.pinned]
        need = min(key, len(able))
        victims = self.victims(need)
        assert len({self.key_of(v) for v in victims} & set(able)) == need
        with pytest.raises(PolicyError, match="should give up"):
            self.victims(len(able) + 1)


def play(store: Store, reference: Reference, script: list[Event]) -> None:
    for event in script:
        getattr(store, event.what)(event.key)
        reference.pinned = set(store.pinned)
        if event.what == "request":
            reference.request(event.key)
        elif event.what == "remove":
            reference.remove(event.key)
        assert store.evicted == reference.evicted
        assert sorted(store.residents) == sorted(reference.residents())


@pytest.mark.parametrize("name", ONLINE)
@given(events, st.integers(1, 7))
def test_a_store_evicts_what_the_reference_does(
    name: str, script: list[Event], capacity: int
) -> None:
    """Also with pinned and removed blocks, and searches whose victims stay after all."""
    play(Store(MAKERS[name](), capacity), REFERENCES[name](capacity), script)


@pytest.mark.parametrize("name", ONLINE)
def test_a_store_evicts_what_the_reference_does_for_long(name: str) -> None:
    random = np.random.default_rng(0)
    kinds = random.choice(["request", "remove", "pin", "unpin", "ask"], 1200,
                          p=[0.8, 0.04, 0.06, 0.06, 0.04])  # fmt: skip
    keys = np.minimum(random.zipf(1.3, 1200) - 1 + random.integers(0, 4, 1200), KEYS - 1)
    script = [Event(str(what), int(key)) for what, key in zip(kinds, keys, strict=True)]
    store = Store(MAKERS[name](), 11)
    play(store, REFERENCES[name](11), script)
    assert len(store.evicted) > 100


@pytest.mark.parametrize("category", [[0, -1, 0], [0, 1 << 20, 0], [0, 0]])
def test_categories_that_compiled_code_would_look_up_elsewhere_are_refused(
    category: list[int],
) -> None:
    def replayed() -> None:
        policy = WorkloadAware()
        policy.start(4, 2, category=np.array(category, np.int32))
        policy.request(np.arange(3, dtype=np.int32))

    with pytest.raises(ConfigError, match="categories"):
        replayed()


@pytest.mark.parametrize("capacity", [0, -1, 2.7, np.nan, np.inf, "5", None, True, 2**63, 2**64])
def test_a_capacity_that_cannot_be_counted_is_refused(capacity: Any) -> None:  # noqa: ANN401
    """In 64 bits, 2**63 is less than nothing: all misses, and no word of it."""
    with pytest.raises(ConfigError, match=r"^capacity=.*: expected a whole number from 1 to 576"):
        replay(RequestTrace.of_blocks([1, 2, 1]), CLOCK(), capacity)


def test_a_capacity_of_numpy_is_a_number() -> None:
    one: Any = np.int64(1)
    assert replay(RequestTrace.of_blocks([1, 1]), CLOCK(), one).hits.tolist() == [0, 1]


@pytest.mark.parametrize("policy", [5, None, LRU(), CLOCK])
def test_only_policies_that_keep_an_order_are_replayed(policy: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"^policy=.*: expected a QueuePolicy"):
        replay(RequestTrace.of_blocks([1, 1]), policy, 1)
