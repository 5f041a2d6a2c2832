"""W-TinyLFU (Einziger, Friedman and Manes, 2017), with exact counts in place of a sketch."""

from tierstore.kernels.jit import part
from tierstore.policies.queues import lists
from tierstore.policies.queues.base import QueuePolicy, checked_share
from tierstore.policies.queues.lists import (
    CAPACITY,
    COUNT,
    OWN_FIELD,
    PLACE,
    attach,
    detach,
    move,
    oldest,
    oldest_able,
    oldest_of_either,
    own_column,
    push,
    put,
    share,
    unlink,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 3
_WINDOW, _PROBATION, _PROTECTED = range(RESIDENT)
_COUNTED, _LINK = 3, OWN_FIELD
"""A list of all keys whose count is not 0, resident or not, by links of its own."""
_COUNTS = own_column(4)
_WINDOW_SHARE, _PROTECTED_SHARE = range(2)
_MOST = 15
_SAMPLE = 10


@part
def _count(q, d, k):
    """One more use."""
    count = q.node[k, COUNT]
    if count >= _MOST:
        return
    if count <= 0:
        attach(q, d, _COUNTED, k, _LINK)
        count = 0
    put(q, k, COUNT, count + 1)
    q.head[d, _COUNTS] = q.head[d, _COUNTS] + 1


@part
def _age(q, d):
    """Halve all counts whenever they come to ten capacities.

    After a miss only when the key is in: before, a store does not say that it missed a block which
    its policy never knew.
    """
    if q.head[d, _COUNTS] < _SAMPLE * q.head[d, CAPACITY]:
        return
    total = 0
    k = oldest(q, d, _COUNTED)
    while k >= 0:
        following = q.node[k, _LINK + 1]
        put(q, k, COUNT, q.node[k, COUNT] >> 1)
        total += q.node[k, COUNT]
        if q.node[k, COUNT] == 0:
            detach(q, d, _COUNTED, k, _LINK)
        k = following
    q.head[d, _COUNTS] = total


@part
def _window(q, d):
    return max(1, share(q, d, _WINDOW_SHARE))


@part
def hit(q, d, k):
    _count(q, d, k)
    _age(q, d)
    if q.node[k, PLACE] == _WINDOW:
        move(q, d, _WINDOW, k)
        return
    move(q, d, _PROTECTED, k)
    limit = int((q.head[d, CAPACITY] - _window(q, d)) * q.rules[_PROTECTED_SHARE])
    while weight(q, d, _PROTECTED) > limit:
        move(q, d, _PROBATION, oldest(q, d, _PROTECTED))


@part
def miss(q, d, k):
    _count(q, d, k)


@part
def miss_again(q, d, k):
    _count(q, d, k)


@part
def insert(q, d, k):
    push(q, d, _WINDOW, k)
    while weight(q, d, _WINDOW) > _window(q, d):
        move(q, d, _PROBATION, oldest(q, d, _WINDOW))
    _age(q, d)


@part
def evict(q, d):
    candidate = oldest_able(q, d, _WINDOW)
    if candidate >= 0 and weight(q, d, _WINDOW) >= _window(q, d):
        # What comes in pushes the candidate out of the window.
        move(q, d, _PROBATION, candidate)
        k = oldest_able(q, d, _PROBATION)
        if q.node[candidate, COUNT] <= q.node[k, COUNT]:
            k = candidate
    else:
        k = oldest_of_either(q, d, _PROBATION, _PROTECTED)
        if k < 0:
            k = candidate
    unlink(q, d, k)
    return k


@part
def drop(q, d, k):
    lists.drop(q, d, k)
    if q.node[k, COUNT] > 0:
        q.head[d, _COUNTS] = q.head[d, _COUNTS] - q.node[k, COUNT]
        detach(q, d, _COUNTED, k, _LINK)
        put(q, k, COUNT, 0)


class WTinyLFU(QueuePolicy):
    """A small LRU window; what leaves it stays only if it was used more often than who would go.

    Keys are numbered here, so each has a counter of its own, up to 15, where others keep a sketch
    in which keys share counters. All counts are halved when their sum reaches ten capacities. With
    no shared counters there is nothing to attack, and no random admission that guards against it.

    Parameters
    ----------
    window: share of the capacity that is the window, at least one block.
    protected: share of the rest that is protected; see `SLRU`.
    """

    lists = 4
    numbers = (0,)
    own_fields = 2
    loops = compile_loops(globals())

    def __init__(self, window: float = 0.01, protected: float = 0.8) -> None:
        super().__init__(checked_share("window", window), checked_share("protected", protected))
