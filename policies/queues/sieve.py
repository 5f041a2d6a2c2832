"""SIEVE (Zhang et al., NSDI 2024): one queue, and a hand that passes over what was used."""

from tierstore.kernels.jit import part
from tierstore.policies.queues import lists
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import (
    COUNT,
    NEWER,
    PLACE,
    may_leave,
    oldest,
    own_column,
    push,
    put,
    unlink,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_QUEUE = 0
_HAND = own_column(1)


@part
def hit(q, d, k):
    q.node[k, COUNT] = 1


@part
def insert(q, d, k):
    put(q, k, COUNT, 0)
    push(q, d, _QUEUE, k)


@part
def evict(q, d):
    k = q.head[d, _HAND]
    if k < 0:
        k = oldest(q, d, _QUEUE)
    while q.node[k, COUNT] == 1 or not may_leave(q, k):
        if may_leave(q, k):
            put(q, k, COUNT, 0)
        k = q.node[k, NEWER]
        if k < 0:
            k = oldest(q, d, _QUEUE)
    q.head[d, _HAND] = q.node[k, NEWER]
    unlink(q, d, k)
    return k


@part
def drop(q, d, k):
    if q.node[k, PLACE] == _QUEUE and q.head[d, _HAND] == k:
        q.head[d, _HAND] = q.node[k, NEWER]
    lists.drop(q, d, k)


class SIEVE(QueuePolicy):
    """Evicts the first that was not used since the hand last passed; survivors stay in place.

    Removing what is under the hand moves the hand one step towards the new end.
    """

    lists = 1
    numbers = (-1,)
    loops = compile_loops(globals())
