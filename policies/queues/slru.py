"""Segmented LRU: probation, then protection."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy, checked_share
from tierstore.policies.queues.lists import (
    move,
    oldest,
    oldest_of_either,
    push,
    share,
    unlink,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 2
_PROBATION, _PROTECTED = range(RESIDENT)
_PROTECTED_SHARE = 0


@part
def hit(q, d, k):
    move(q, d, _PROTECTED, k)
    while weight(q, d, _PROTECTED) > share(q, d, _PROTECTED_SHARE):
        move(q, d, _PROBATION, oldest(q, d, _PROTECTED))


@part
def insert(q, d, k):
    push(q, d, _PROBATION, k)


@part
def evict(q, d):
    k = oldest_of_either(q, d, _PROBATION, _PROTECTED)
    unlink(q, d, k)
    return k


class SLRU(QueuePolicy):
    """Two LRU lists: a use protects; what falls out of protection is on probation again.

    Parameters
    ----------
    protected: share of the capacity that is protected.
    """

    lists = 2
    loops = compile_loops(globals())

    def __init__(self, protected: float = 0.8) -> None:
        super().__init__(checked_share("protected", protected))
