"""First in, first out."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import oldest_able, push, unlink
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_QUEUE = 0


@part
def insert(q, d, k):
    push(q, d, _QUEUE, k)


@part
def evict(q, d):
    k = oldest_able(q, d, _QUEUE)
    unlink(q, d, k)
    return k


class FIFO(QueuePolicy):
    """Evicts what came in longest ago; use changes nothing."""

    lists = 1
    loops = compile_loops(globals())
