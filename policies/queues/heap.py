"""A priority queue of keys, one for each domain: a pairing heap (Fredman et al., 1986) in nodes.

The key with the lowest priority comes first, among equals the one that got its priority first. A
policy on top of it has one list, of which the heap uses the oldest key alone: it is the root.
"""

from tierstore.kernels.jit import part
from tierstore.policies.queues.lists import (
    CAPACITY,
    NEWER,
    NOWHERE,
    OLDER,
    OWN_FIELD,
    PLACE,
    TIME,
    may_leave,
    put,
)

HEAP_FIELDS = 1
_BACK, _SIBLING, _CHILD = OLDER, NEWER, OWN_FIELD
"""_BACK is the sibling before a key, or the parent of a first child."""
_ROOT = CAPACITY + 2
_HEAP = 0


@part
def _meld(q, a, b):
    """One heap from two roots; returns its root."""
    if a < 0:
        return b
    if b < 0:
        return a
    if q.rank[b, 0] < q.rank[a, 0] or (
        q.rank[b, 0] == q.rank[a, 0] and q.rank[b, 1] < q.rank[a, 1]
    ):
        a, b = b, a
    child = q.node[a, _CHILD]
    put(q, b, _SIBLING, child)
    put(q, b, _BACK, a)
    if child >= 0:
        put(q, child, _BACK, b)
    put(q, a, _CHILD, b)
    return a


@part
def _meld_siblings(q, first):
    """One heap from a chain of siblings: pairs from left to right, then all from right to left."""
    pairs = -1
    while first >= 0:
        second = q.node[first, _SIBLING]
        following = -1
        if second >= 0:
            following = q.node[second, _SIBLING]
        pair = _meld(q, first, second)
        put(q, pair, _SIBLING, pairs)
        pairs = pair
        first = following
    root = -1
    while pairs >= 0:
        following = q.node[pairs, _SIBLING]
        root = _meld(q, root, pairs)
        pairs = following
    return root


@part
def _set_root(q, d, root):
    q.head[d, _ROOT] = root
    if root >= 0:
        put(q, root, _BACK, -1)
        put(q, root, _SIBLING, -1)


@part
def heap_insert(q, d, k):
    """Enter a key with the priority ``rank[k]``."""
    put(q, k, PLACE, _HEAP)
    put(q, k, _CHILD, -1)
    put(q, k, _SIBLING, -1)
    put(q, k, _BACK, -1)
    _set_root(q, d, _meld(q, q.head[d, _ROOT], k))


@part
def heap_remove(q, d, k):
    """Take a key out; it is then nowhere."""
    below = _meld_siblings(q, q.node[k, _CHILD])
    back, sibling = q.node[k, _BACK], q.node[k, _SIBLING]
    if back < 0:
        _set_root(q, d, below)
    else:
        if q.node[back, _CHILD] == k:
            put(q, back, _CHILD, sibling)
        else:
            put(q, back, _SIBLING, sibling)
        if sibling >= 0:
            put(q, sibling, _BACK, back)
        _set_root(q, d, _meld(q, q.head[d, _ROOT], below))
    put(q, k, PLACE, NOWHERE)


@part
def heap_move(q, d, k, priority):
    """Give a key that is in the heap another priority."""
    heap_remove(q, d, k)
    q.rank[k, 0], q.rank[k, 1] = priority, q.clock[TIME]
    heap_insert(q, d, k)


@part
def heap_enter(q, d, k, priority):
    """Enter a key with that priority."""
    q.rank[k, 0], q.rank[k, 1] = priority, q.clock[TIME]
    heap_insert(q, d, k)


@part
def heap_pop(q, d):
    """Take out the first key that may leave."""
    passed = -1
    k = q.head[d, _ROOT]
    while not may_leave(q, k):
        heap_remove(q, d, k)
        put(q, k, _SIBLING, passed)
        passed = k
        k = q.head[d, _ROOT]
    heap_remove(q, d, k)
    while passed >= 0:
        following = q.node[passed, _SIBLING]
        heap_insert(q, d, passed)
        passed = following
    return k


@part
def heap_drop(q, d, k):
    """Take out a key that is gone for good."""
    if q.node[k, PLACE] >= 0:
        heap_remove(q, d, k)
