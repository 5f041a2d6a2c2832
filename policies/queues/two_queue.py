"""2Q (Johnson and Shasha, VLDB 1994), the full version."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy, checked_share
from tierstore.policies.queues.lists import (
    COUNT,
    PLACE,
    forget_oldest,
    move,
    oldest_of_either,
    push,
    put,
    share,
    unlink,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 2
_IN, _MAIN, _OUT = range(3)
_IN_SHARE, _OUT_SHARE = range(2)


@part
def hit(q, d, k):
    if q.node[k, PLACE] == _MAIN:
        move(q, d, _MAIN, k)


@part
def miss(q, d, k):
    put(q, k, COUNT, _IN)
    if q.node[k, PLACE] == _OUT:
        unlink(q, d, k)
        put(q, k, COUNT, _MAIN)


@part
def insert(q, d, k):
    push(q, d, q.node[k, COUNT], k)


@part
def evict(q, d):
    if weight(q, d, _IN) > max(1, share(q, d, _IN_SHARE)):
        k = oldest_of_either(q, d, _IN, _MAIN)
    else:
        k = oldest_of_either(q, d, _MAIN, _IN)
    if q.node[k, PLACE] == _IN:
        move(q, d, _OUT, k)
        forget_oldest(q, d, _OUT, share(q, d, _OUT_SHARE))
    else:
        unlink(q, d, k)
    return k


class TwoQueue(QueuePolicy):
    """A FIFO for what is new, an LRU list for what comes back after it left the FIFO.

    Parameters
    ----------
    small: share of the capacity from which on the FIFO gives up a block before the LRU list does.
    ghosts: as many blocks that left the FIFO are remembered, as a share of the capacity.
    """

    lists = 3
    loops = compile_loops(globals())

    def __init__(self, small: float = 0.25, ghosts: float = 0.5) -> None:
        super().__init__(checked_share("small", small), checked_share("ghosts", ghosts, most=8.0))
