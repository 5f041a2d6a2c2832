"""The reduced base of policies that keep an order: amortised O(1) an event, for large domains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.arguments import check_whole, is_number
from tierstore.errors import ConfigError, PolicyError
from tierstore.interfaces import Access, Demand, EvictionPolicy, Ids, Pointers
from tierstore.policies.queues.lists import (
    CAPACITY,
    OWN_FIELD,
    SAVED,
    SERIAL,
    TIME,
    Queues,
    own_column,
)

if TYPE_CHECKING:
    from tierstore.policies.queues.loops import Loops

_NONE: Ids = np.zeros(0, np.int32)
_CATEGORIES = 1 << 16
"""Numbers of categories below this are fine whatever the number of requests."""
MOST_CAPACITY = 1 << 59
"""In blocks or bytes: policies count in int64, up to eight times as much."""
_MOST_BYTES = 1 << 62
_NO_NODES: Ids = np.zeros((0, 0), np.int32)


class _Column(Protocol):
    @property
    def array(self) -> npt.NDArray[Any]: ...


class Space(Protocol):
    """Gives out arrays with one entry per key; a `HandleSpace`, or what a replay has instead."""

    def column(
        self,
        dtype: npt.DTypeLike,
        fill: float = 0,
        purpose: str = "policy",
        entry: tuple[int, ...] = (),
    ) -> _Column:
        """As ``HandleSpace.column``."""


class QueuePolicy(EvictionPolicy):
    """A policy of linked lists. Its file has a few compiled functions, its class says how many
    lists there are; `tierstore.policies.queues.lists` has the parts.

    A store asks for victims and may then not evict them. So a search runs in earnest and saves what
    it changes; unless the next event is the eviction of just those blocks, all is taken back.

    An event costs amortised O(1) for each of its blocks, O(log n) in a heap. A search costs as much
    for each victim, and looks once at every resident of its domains: which may leave, and whether
    one was never admitted. So does the store that asks; it asks for many victims at once.

    Attributes
    ----------
    lists: how many the policy has, of residents and of ghosts. numbers: what its own numbers of a
        domain begin as. own_fields: fields of a key beyond the common ones. is_ranked: whether keys
        have priorities. loops: its compiled functions.
    """

    lists: ClassVar[int]
    numbers: ClassVar[tuple[int, ...]] = ()
    own_fields: ClassVar[int] = 0
    is_ranked: ClassVar[bool] = False
    needs_future: ClassVar[bool] = False
    loops: ClassVar[Loops]

    def __init__(self, *rules: float) -> None:
        self._rules = np.array(rules, np.float64)
        self._size = self._future = np.zeros(0, np.int64)
        self._cost = np.zeros(0, np.float64)
        self._category, self._reuse = _NONE, np.zeros((0, 2))
        self._clock = np.array([0, 0, -1], np.int64)
        self._pending: Ids | None = None
        empty_list = (-1, -1, 0)
        self._empty_domain = np.array([0, 0, *empty_list * self.lists, *self.numbers], np.int64)
        assert len(self._empty_domain) == own_column(self.lists) + len(self.numbers)
        self._head = self._empty_domain[None].copy()

    # As the store's policy

    def bind(self, space: Space) -> None:
        fields = (OWN_FIELD + self.own_fields,)
        self._node = space.column(np.int32, fill=-1, entry=fields)
        self._saved = space.column(np.int32, entry=fields)
        self._rank = space.column(np.float64, entry=(2 if self.is_ranked else 0,))
        self._able = space.column(np.int32)

    def on_capacity(self, domains: Ids, blocks: Pointers) -> None:
        self._settle()
        self._reserve(domains)
        self._head[domains, CAPACITY] = blocks

    def on_access(self, access: Access) -> None:
        self._settle()
        self.loops.touch(self._state(), access.handles)

    def on_admit(self, handles: Ids, domains: Ids) -> None:
        self._settle()
        self._reserve(domains)
        self.loops.admit(self._state(), domains, handles)

    def victims(self, demand: Demand) -> Ids:
        self._settle()
        self._check(demand)
        self._reserve(demand.domains)
        self._before = demand.domains.copy(), self._head[demand.domains], self._clock[TIME]
        self._clock[SERIAL] += 1
        self._able.array[demand.residents[demand.eligible]] = self._clock[SERIAL]
        # First, so that a search that is interrupted is taken back, too.
        self._pending = np.full(int(demand.need.sum()), -1, np.int32)
        self._search(demand, self._pending)
        return self._pending.copy()

    def on_evict(self, handles: Ids) -> None:
        pending = self._pending
        if pending is not None and len(handles) and np.array_equal(pending, handles):
            self._pending = None
        else:
            self.on_remove(handles)

    def on_remove(self, handles: Ids) -> None:
        self._settle()
        self.loops.remove(self._state(), handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        self._settle()
        self._head[domains[domains < len(self._head)]] = self._empty_domain

    def _check(self, demand: Demand) -> None:
        able = np.concatenate([[0], np.cumsum(demand.eligible)])[demand.row_ptr]
        short = np.flatnonzero(np.diff(able) < demand.need)
        if len(short):
            row = short[0]
            raise PolicyError(
                f"{type(self).__name__}: domain {demand.domains[row]} should give up "
                f"{demand.need[row]} blocks, but fewer may leave"
            )

    def _search(self, demand: Demand, victims: Ids) -> None:
        """Evict in earnest. Residents that were never admitted come in first."""
        state = self._state(self._able.array, self._saved.array)
        counts = np.diff(demand.row_ptr)
        capacity = self._head[demand.domains, CAPACITY]
        self._head[demand.domains, CAPACITY] = np.where(capacity, capacity, counts)
        self.loops.admit(state, np.repeat(demand.domains, counts), demand.residents)
        self.loops.choose(state, demand.domains, demand.need, victims)

    def _settle(self) -> None:
        """Take back what a search changed, unless it was carried out."""
        if self._pending is not None:
            self.loops.take_back(self._state(saved=self._saved.array))
            domains, heads, time = self._before
            self._head[domains] = heads
            self._clock[TIME] = time
            self._pending = None
        self._clock[SAVED] = -1

    def _reserve(self, domains: Ids) -> None:
        short = int(domains.max(initial=-1)) + 1 - len(self._head)
        if short > 0:
            more = np.tile(self._empty_domain, (max(short, len(self._head) // 4), 1))
            self._head = np.concatenate([self._head, more])

    def _state(self, able: Ids = _NONE, saved: Ids = _NO_NODES) -> Queues:
        return Queues(
            self._node.array, self._head, self._head.view(np.float64), self._rank.array, self._size,
            self._cost, able, saved, self._clock, self._future, self._category, self._reuse,
            self._rules,
        )  # fmt: skip

    # In a replay

    def start(
        self,
        keys: int,
        capacity: int,
        size: npt.NDArray[np.int64] | None = None,
        cost: npt.NDArray[np.float64] | None = None,
        category: Ids | None = None,
    ) -> None:
        """Begin with nothing, for keys numbered below `keys` and one domain of that capacity.

        ConfigError, and no change, for what compiled code would count wrong.

        Parameters
        ----------
        keys: at most 2**31 - 1. capacity: from 1 to 2**59.
        size, cost: of each key, above 0, where they differ; sizes of at most 2**62 together.
        category: of each request, at least 0, all that will come, counted from 0; None if unknown.
        """
        if hasattr(self, "_node"):
            raise ConfigError(f"this {type(self).__name__} is in use: expected a new one")
        check_whole("keys", keys, 0, 2**31 - 1)
        check_whole("capacity", capacity, 1, MOST_CAPACITY)
        for name, of_each, kind in (("sizes", size, "i"), ("costs", cost, "f")):
            if of_each is not None:
                _check_numbers(name, of_each, kind)
                if len(of_each) != keys:
                    raise ConfigError(
                        f"{len(of_each)} {name} for {keys} keys: expected one of each"
                    )
                if not (np.isfinite(of_each) & (of_each > 0)).all():
                    raise ConfigError(f"{name}: expected finite numbers above 0")
        if size is not None and size.sum(dtype=np.float64) > _MOST_BYTES:
            raise ConfigError(f"sizes: expected at most {_MOST_BYTES} together, found more")
        categories = None if category is None else _checked_categories(category)
        self.bind(_KeySpace(keys))
        if size is not None:
            self._size = size
        if cost is not None:
            self._cost = cost
        if categories is not None:
            self._category = categories
            self._reuse = np.zeros((int(categories.max(initial=-1)) + 1, 2))
        self.on_capacity(np.zeros(1, np.int32), np.array([capacity]))

    def expect(self, future: npt.NDArray[np.int64]) -> None:
        """Say when the key of each request, counted from 0, is requested again: int64 [n]."""
        _check_numbers("future", future, "i")
        self._future = future

    def request(self, keys: Ids) -> npt.NDArray[np.bool_]:
        """Get or insert each key, one after the other; whether it was there.

        What is larger than the capacity never comes in, and nobody leaves for it. ConfigError, and
        no change, for keys that `start` was not told, and where `expect` must tell more.
        """
        self._check_requests(keys)
        hits = np.zeros(len(keys), np.bool_)
        self.loops.request(self._state(), 0, keys, hits)
        return hits

    def _check_requests(self, keys: Ids) -> None:
        """Compiled code does not look where it reads and writes."""
        name = type(self).__name__
        if not hasattr(self, "_node"):
            raise ConfigError(f"{name}: request before start: call start first")
        _check_numbers("keys", keys, "iu")
        known, told = len(self._node.array), len(self._future)
        if len(keys) and (keys.min() < 0 or keys.max() >= known):
            given = f"keys from {keys.min()} to {keys.max()}"
            raise ConfigError(f"{given}: expected 0 to {known - 1}, as start was told")
        made = int(self._clock[TIME]) + len(keys)
        if len(self._reuse) and made > len(self._category):
            raise ConfigError(
                f"{name} was told the categories of {len(self._category)} requests, {made} were "
                "made: tell start of all that are to come"
            )
        if self.needs_future and made > told:
            raise ConfigError(
                f"{name} knows the future of {told} requests, {made} were made: tell it more with "
                "expect"
            )


def _checked_categories(category: Ids) -> Ids:
    """Compiled code has a table of them, and does not look where it reads and writes."""
    _check_numbers("categories", category, "i")
    end = max(len(category), _CATEGORIES)
    if len(category) and not 0 <= category.min() <= category.max() < end:
        raise ConfigError(
            f"categories from {category.min()} to {category.max()}: expected numbers from 0 on, "
            f"below {end}"
        )
    return category


def _check_numbers(name: str, given: object, kinds: str) -> None:
    """Compiled code is for arrays of one axis, of whole numbers or of others."""
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in kinds:
        what = (
            f"{given.dtype} of {given.ndim} axes"
            if isinstance(given, np.ndarray)
            else type(given).__name__
        )
        wanted = "floats" if kinds == "f" else "whole numbers"
        raise ConfigError(f"{name}: expected an array [n] of {wanted}, found {what}")


class _KeySpace:
    """Columns for a fixed number of keys. The system gives memory only to what is written."""

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def column(
        self,
        dtype: npt.DTypeLike,
        fill: float = 0,
        purpose: str = "policy",
        entry: tuple[int, ...] = (),
    ) -> _Fixed:
        column = np.zeros((self._keys, *entry), dtype)
        if fill:
            column.fill(fill)
        return _Fixed(column)


class _Fixed(NamedTuple):
    array: npt.NDArray[Any]


def checked_share(name: str, value: float, most: float = 1.0) -> float:
    """`value` if it is a share above 0; ConfigError otherwise."""
    if not (is_number(value) and 0 < value <= most):
        raise ConfigError(
            f"{name}={value!r}: expected a share of the capacity above 0, up to {most}"
        )
    return value
