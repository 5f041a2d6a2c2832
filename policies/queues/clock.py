"""CLOCK: FIFO with second chances."""

from tierstore.arguments import check_whole
from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import COUNT, NEWER, may_leave, move, oldest, push, put, unlink
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_QUEUE = 0
_MOST = 0


@part
def hit(q, d, k):
    if q.node[k, COUNT] < q.rules[_MOST]:
        put(q, k, COUNT, q.node[k, COUNT] + 1)


@part
def insert(q, d, k):
    put(q, k, COUNT, 0)
    push(q, d, _QUEUE, k)


@part
def evict(q, d):
    k = oldest(q, d, _QUEUE)
    while True:
        newer = q.node[k, NEWER]
        if may_leave(q, k):
            if q.node[k, COUNT] == 0:
                unlink(q, d, k)
                return k
            put(q, k, COUNT, q.node[k, COUNT] - 1)
            move(q, d, _QUEUE, k)
        k = newer if newer >= 0 else oldest(q, d, _QUEUE)


class CLOCK(QueuePolicy):
    """Evicts the oldest that was not used since it last stood at the old end.

    Parameters
    ----------
    bits: of each block's counter; it comes back that often at most, 2**bits - 1 times.
    """

    lists = 1
    loops = compile_loops(globals())

    def __init__(self, bits: int = 1) -> None:
        super().__init__(2 ** check_whole("bits", bits, 1, 16) - 1)
