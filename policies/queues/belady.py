"""Belady's MIN (1966): evicts what is needed last. It has to know the future: replays only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.heap import HEAP_FIELDS, heap_drop, heap_enter, heap_move, heap_pop
from tierstore.policies.queues.lists import TIME, oldest
from tierstore.policies.queues.loops import compile_loops

if TYPE_CHECKING:
    from typing import NoReturn

    from tierstore.interfaces import Access, Demand

RESIDENT = 1
_HEAP = 0
_MAY_BYPASS = 0
evict = heap_pop
drop = heap_drop


@part
def hit(q, d, k):
    heap_move(q, d, k, -float(q.future[q.clock[TIME]]))


@part
def insert(q, d, k):
    heap_enter(q, d, k, -float(q.future[q.clock[TIME]]))


@part
def refuses(q, d, k):
    worst = oldest(q, d, _HEAP)
    return q.rules[_MAY_BYPASS] > 0 and -float(q.future[q.clock[TIME]]) <= q.rank[worst, 0]


class Belady(QueuePolicy):
    """Evicts what is requested again last; optimal for blocks of equal size.

    With sizes it goes by distance alone and is no optimum. O(log n) amortised.

    Parameters
    ----------
    bypass: whether what misses may stay out if it would be the next to go. Never worse; False
        brings everything in, as most published numbers do.
    """

    lists = 1
    own_fields = HEAP_FIELDS
    is_ranked = True
    needs_future = True
    loops = compile_loops(globals())

    def __init__(self, *, bypass: bool = True) -> None:
        if not isinstance(bypass, bool):
            raise ConfigError(f"bypass={bypass!r}: expected True or False")
        super().__init__(float(bypass))

    def on_access(self, access: Access) -> NoReturn:
        raise _unknown_future()

    def victims(self, demand: Demand) -> NoReturn:
        raise _unknown_future()


def _unknown_future() -> ConfigError:
    return ConfigError("Belady knows the future of replays only: choose another policy for a store")
