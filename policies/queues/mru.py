"""Most recently used."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import OLDER, may_leave, move, newest, push, unlink
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_QUEUE = 0


@part
def hit(q, d, k):
    move(q, d, _QUEUE, k)


@part
def insert(q, d, k):
    push(q, d, _QUEUE, k)


@part
def evict(q, d):
    k = newest(q, d, _QUEUE)
    while not may_leave(q, k):
        k = q.node[k, OLDER]
    unlink(q, d, k)
    return k


class MRU(QueuePolicy):
    """Evicts what was used last: good for loops that are larger than the capacity."""

    lists = 1
    loops = compile_loops(globals())
