"""Least frequently used."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.heap import (
    HEAP_FIELDS,
    heap_drop,
    heap_enter,
    heap_move,
    heap_pop,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
evict = heap_pop
drop = heap_drop


@part
def hit(q, d, k):
    heap_move(q, d, k, q.rank[k, 0] + 1)


@part
def insert(q, d, k):
    heap_enter(q, d, k, 1.0)


class LFU(QueuePolicy):
    """Evicts what was used least often while resident, among equals what came to that count first.

    O(log n) amortised.
    """

    lists = 1
    own_fields = HEAP_FIELDS
    is_ranked = True
    loops = compile_loops(globals())
