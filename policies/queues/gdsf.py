"""GreedyDual-Size with Frequency (Cherkasova, 1998), and without sizes: LFU with dynamic ageing."""

import numpy as np

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.heap import HEAP_FIELDS, heap_drop, heap_enter, heap_move, heap_pop
from tierstore.policies.queues.lists import COUNT, cost_of, own_column, put, size_of
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_AGE = own_column(1)
_USES_SIZES = 0
drop = heap_drop


@part
def age_of(q, d):
    """The last evicted priority."""
    return q.real[d, _AGE]


@part
def worth(q, k):
    """Uses of a key x cost / size."""
    return q.node[k, COUNT] * np.true_divide(cost_of(q, k), size_of(q, k))


@part
def _priority(q, d, k):
    uses_sizes = q.rules[_USES_SIZES] > 0
    return age_of(q, d) + (worth(q, k) if uses_sizes else float(q.node[k, COUNT]))


@part
def hit(q, d, k):
    put(q, k, COUNT, q.node[k, COUNT] + 1)
    heap_move(q, d, k, _priority(q, d, k))


@part
def insert(q, d, k):
    put(q, k, COUNT, 1)
    heap_enter(q, d, k, _priority(q, d, k))


@part
def evict(q, d):
    k = heap_pop(q, d)
    q.real[d, _AGE] = q.rank[k, 0]
    return k


class GDSF(QueuePolicy):
    """Evicts the lowest age + uses x cost / size, where age is the last evicted priority.

    Sizes and costs are those of a trace; in a store all blocks are equal. O(log n) amortised.
    """

    lists = 1
    numbers = (0,)
    own_fields = HEAP_FIELDS
    is_ranked = True
    loops = compile_loops(globals())

    def __init__(self) -> None:
        super().__init__(1.0)


class LFUDA(GDSF):
    """Evicts the lowest age + uses (Arlitt et al., 1999), whatever sizes and costs are."""

    def __init__(self) -> None:
        QueuePolicy.__init__(self, 0.0)
