"""Least recently used, as a list."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import move, oldest_able, push, unlink
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
    k = oldest_able(q, d, _QUEUE)
    unlink(q, d, k)
    return k


class QueueLRU(QueuePolicy):
    """Evicts what was used longest ago. `LRU` does so too, and prefers low scores among equals."""

    lists = 1
    loops = compile_loops(globals())
