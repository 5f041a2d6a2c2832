"""A small cache that drives a policy as a store does, and plain Python that says what is best."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.directory import HandleSpace
from tierstore.interfaces import Access, BlockScores, Demand
from tierstore.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy.typing as npt

    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Scores
    from tierstore.kernels.element import Array

SEGMENTS = 3
_DOMAIN = 0


class Run(NamedTuple):
    """What a cache did: whether each request was a hit, and the keys that left, in order."""

    hits: list[bool]
    evicted: list[int]


class PolicyCache:
    """One domain of blocks in a tier, whose policy says who leaves; every answer is checked.

    A key is the number of a block: block ``key // SEGMENTS`` of segment ``key % SEGMENTS``.

    Parameters
    ----------
    policy: a new one; it is bound here.
    keys: how many there are.
    capacity: blocks that fit.
    renumbering: where to put each segment, and each block within its segment; in order by default.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        keys: int,
        capacity: int,
        renumbering: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self.policy = policy
        self.keys = keys
        self.capacity = capacity
        self.residents: list[int] = []
        self.pinned: set[int] = set()
        self.evicted: list[int] = []
        self._depth = -(-keys // SEGMENTS)
        places, self._blocks = renumbering or (range(SEGMENTS), range(self._depth))
        self._space = HandleSpace(_Uncounted())
        policy.bind(self._space)
        self._segments = self._space.open(SEGMENTS)[list(places)]
        self._space.extend(np.sort(self._segments), self._depth)
        self._number_keys()
        self._running = self._access([], None, 0)
        self._tell_capacity()

    def handles(self, keys: Iterable[int]) -> Ids:
        """What the policy knows the keys by."""
        return np.array([self._handle_of[key] for key in keys], np.int32)

    def request(self, keys: Sequence[int], scores: Scores | None = None) -> list[bool]:
        """A step that selects distinct `keys`: which were there. Afterwards all of them are.

        scores: float32 [keys] of all blocks, if the step has any.
        """
        hits = [key in self.residents for key in keys]
        self._running = self._access(keys, scores, self._running.step + 1)
        self.policy.on_access(self._running)
        missing = [key for key in keys if key not in self.residents]
        self.evict(max(0, len(self.residents) + len(missing) - self.capacity), used=keys)
        self.residents += missing
        self.policy.on_admit(self.handles(missing), np.full(len(missing), _DOMAIN, np.int32))
        assert len(self.residents) <= self.capacity
        return hits

    def run(self, requests: Iterable[int], scores_seed: int | None = None) -> Run:
        """Request one key after the other, with scores drawn anew for each."""
        began = len(self.evicted)
        hits: list[bool] = []
        for key in requests:
            scores = None if scores_seed is None else self.scores(scores_seed)
            hits += self.request([key], scores)
        return Run(hits, self.evicted[began:])

    def scores(self, seed: int) -> Scores:
        """Random scores of all keys in the next step."""
        random = np.random.default_rng((seed, self._running.step))
        return random.normal(size=self.keys).astype(np.float32)

    def may_leave(self, used: Collection[int] = ()) -> list[int]:
        """Residents that are neither pinned nor used by the running step."""
        return [key for key in self.residents if key not in self.pinned and key not in used]

    def victims(self, count: int, used: Collection[int] = ()) -> list[int]:
        """Whom the policy names; AssertionError if it may not name them."""
        may_leave = self.may_leave(used)
        demand = Demand(
            domains=np.array([_DOMAIN], np.int32),
            row_ptr=np.array([0, len(self.residents)]),
            residents=self.handles(self.residents),
            eligible=np.isin(self.residents, may_leave),
            need=np.array([count]),
            access=self._running,
        )
        victims = [self._key_of[handle] for handle in self.policy.victims(demand).tolist()]
        assert len(victims) == count, f"{count} victims expected, {len(victims)} found"
        assert len(set(victims)) == count, f"a victim is repeated: {victims}"
        assert set(victims) <= set(may_leave), f"{victims} named, {may_leave} may leave"
        return victims

    def evict(self, count: int, used: Collection[int] = ()) -> list[int]:
        """Let `count` blocks go."""
        victims = self.victims(count, used) if count else []
        self.residents = [key for key in self.residents if key not in victims]
        if victims:
            self.policy.on_evict(self.handles(victims))
        self.evicted += victims
        return victims

    def drop(self, key: int) -> None:
        """Let a resident go that the policy did not name."""
        self.residents.remove(key)
        self.policy.on_evict(self.handles([key]))

    def resize(self, capacity: int) -> None:
        """Have another capacity; what is too much leaves before. Enough of it may leave."""
        self.evict(max(0, len(self.residents) - capacity))
        self.capacity = capacity
        self._tell_capacity()

    def remove(self, segment: int) -> None:
        """Let a segment's blocks be gone for good, and new ones have their keys."""
        gone = list(range(segment, self.keys, SEGMENTS))
        self.residents = [key for key in self.residents if key not in gone]
        self.pinned -= set(gone)
        self.policy.on_remove(self.handles(gone))
        self._space.close(int(self._segments[segment]))
        self._segments[segment] = self._space.open(1)[0]
        self._space.extend(self._segments[segment : segment + 1], self._depth)
        self._number_keys()
        self._running = self._access([], None, self._running.step)

    def start_over(self) -> None:
        """Let every segment be gone, and its domain; others have their numbers then."""
        every = np.unique(self._segments)
        self.policy.on_remove(self.handles(range(self.keys)))
        self.residents.clear()
        self.pinned.clear()
        for segment in every[::-1].tolist():
            self._space.close(segment)
        self.policy.on_close(every, np.array([_DOMAIN], np.int32))
        self._space.open(SEGMENTS)
        self._space.extend(every, self._depth)
        self._number_keys()
        self._running = self._access([], None, self._running.step)
        self._tell_capacity()

    def skip(self, steps: int) -> None:
        """Let so many steps pass in which other blocks are used."""
        self._running = self._access([], None, self._running.step + steps)

    def _number_keys(self) -> None:
        order = list(self._blocks)
        per_segment = [self._space.all_handles(s)[order].tolist() for s in self._segments.tolist()]
        self._handle_of = [per_segment[key % SEGMENTS][key // SEGMENTS] for key in range(self.keys)]
        self._key_of = {handle: key for key, handle in enumerate(self._handle_of)}

    def _tell_capacity(self) -> None:
        self.policy.on_capacity(np.array([_DOMAIN], np.int32), np.array([self.capacity]))

    def _access(self, keys: Sequence[int], scores: Scores | None, step: int) -> Access:
        rows = sorted(keys, key=lambda key: key % SEGMENTS)
        counts = np.bincount([key % SEGMENTS for key in keys], minlength=SEGMENTS)
        row_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        selected = np.zeros(len(keys), np.float32) if scores is None else scores[rows]
        everything = None if scores is None else self._everything(scores)
        return Access(row_ptr, self.handles(rows), selected.astype(np.float32), step, everything)

    def _everything(self, scores: Scores) -> BlockScores:
        by_block = np.full((SEGMENTS, self._depth), -np.inf, np.float32)
        for segment in range(SEGMENTS):
            of_segment = scores[segment::SEGMENTS]
            by_block[segment, list(self._blocks)[: len(of_segment)]] = of_segment
        unit_of = np.arange(self._depth, dtype=np.int32)[None]
        return BlockScores(by_block, unit_of, self._segments.copy())


class _NoSlots:
    """The slots of a memory that holds none."""

    array: Bytes = np.zeros(0, np.uint8)

    def resize(self, nbytes: int) -> None:
        """There is nothing to resize."""


class _Uncounted(Memory):
    """Memory without a limit, of which a pickled copy serves as well."""

    def __init__(self) -> None:
        super().__init__(1 << 62, slots=_NoSlots())

    def take(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, purpose: str) -> Array:
        return np.zeros(shape, dtype)

    def give(self, array: Array) -> None:
        """Nothing was counted."""

    def __reduce__(self) -> tuple[type[_Uncounted], tuple[()]]:
        return _Uncounted, ()


def fewest_misses(requests: Sequence[int], capacity: int) -> int:
    """Misses of the best choice there is, if a key that misses need not come in.

    Belady's rule (1966): what is requested again last leaves, or stays out.
    """
    next_use = next_uses(requests)
    residents: dict[int, int] = {}
    misses = 0
    for number, key in enumerate(requests):
        misses += key not in residents
        residents[key] = next_use[number]
        if len(residents) > capacity:
            del residents[max(residents, key=lambda resident: residents[resident])]
    return misses


def next_uses(requests: Sequence[int]) -> list[int]:
    """When each request's key is requested again; the number of requests if never."""
    seen: dict[int, int] = {}
    later = []
    for number in range(len(requests) - 1, -1, -1):
        later.append(seen.get(requests[number], len(requests)))
        seen[requests[number]] = number
    return later[::-1]
