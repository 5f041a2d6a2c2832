"""ARC (Megiddo and Modha, FAST 2003), with a real-valued target."""

import numpy as np

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.lists import (
    CAPACITY,
    COUNT,
    PLACE,
    forget_oldest,
    move,
    oldest_of_either,
    own_column,
    push,
    put,
    unlink,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 2
_ONCE, _TWICE, _ONCE_GHOSTS, _TWICE_GHOSTS = range(4)
_TARGET = own_column(4)
_CAME_FROM = _TARGET + 1
"""The list that the last key that missed was in; -1 for none."""


@part
def hit(q, d, k):
    move(q, d, _TWICE, k)


@part
def miss(q, d, k):
    place = q.node[k, PLACE]
    q.head[d, _CAME_FROM] = place
    put(q, k, COUNT, _ONCE)
    if place < 0:
        return
    put(q, k, COUNT, _TWICE)
    # True division of Python would raise, and a function that may raise runs ten times slower.
    once, twice = weight(q, d, _ONCE_GHOSTS), weight(q, d, _TWICE_GHOSTS)
    target = q.real[d, _TARGET]
    if place == _ONCE_GHOSTS:
        target = min(float(q.head[d, CAPACITY]), target + max(1.0, np.true_divide(twice, once)))
    else:
        target = max(0.0, target - max(1.0, np.true_divide(once, twice)))
    q.real[d, _TARGET] = target
    unlink(q, d, k)


@part
def insert(q, d, k):
    push(q, d, q.node[k, COUNT], k)
    # A store does not say that a block missed which its policy never knew.
    q.head[d, _CAME_FROM] = -1
    capacity = q.head[d, CAPACITY]
    forget_oldest(q, d, _ONCE_GHOSTS, max(0, capacity - weight(q, d, _ONCE)))
    others = weight(q, d, _ONCE) + weight(q, d, _TWICE) + weight(q, d, _ONCE_GHOSTS)
    forget_oldest(q, d, _TWICE_GHOSTS, max(0, 2 * capacity - others))


@part
def evict(q, d):
    once, target = weight(q, d, _ONCE), q.real[d, _TARGET]
    if once > target or (once == target and q.head[d, _CAME_FROM] == _TWICE_GHOSTS):
        k = oldest_of_either(q, d, _ONCE, _TWICE)
    else:
        k = oldest_of_either(q, d, _TWICE, _ONCE)
    move(q, d, _ONCE_GHOSTS if q.node[k, PLACE] == _ONCE else _TWICE_GHOSTS, k)
    return k


class ARC(QueuePolicy):
    """Two LRU lists, of what was used once and more often; ghosts of both say which should grow."""

    lists = 4
    numbers = (0, -1)
    loops = compile_loops(globals())
