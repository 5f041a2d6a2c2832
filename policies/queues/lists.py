"""What queue policies are made of: linked lists over dense arrays.

A key is the number of a row of `Queues.node`. A domain is a row of `Queues.head`: its capacity, the
weight of its residents, then the oldest and newest key and the weight of each list, then the
policy's own numbers. Lists up to the policy's RESIDENT hold residents; the others hold ghosts, keys
that left and are still remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.kernels.jit import part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OLDER, NEWER, PLACE, COUNT, DOMAIN, SAVED_AT = range(6)
"""Fields of a node; a policy may have more, from `OWN_FIELD` on. -1 means none."""
OWN_FIELD = 6

NOWHERE = -1
"""PLACE of a key that is in no list."""
AWAITED = -2
"""PLACE of a key that missed and was not admitted yet; COUNT says where it will go.

It is no ghost any more. `miss_again` hears when it is requested while it stays out.
"""

CAPACITY, USED = 0, 1
_FIRST_LIST = 2


TIME, SERIAL, SAVED = range(3)
"""Of `Queues.clock`: requests so far, the number of the search, and the key it saved last or -1."""


class Queues(NamedTuple):
    """The whole state of a policy.

    node: int32 [keys, fields]. head: int64 [domains, columns]; real is the same memory as float64.
    rank: float64 [keys, 2], priority and when it was given, or no columns. size: int64 [keys], or
    empty where each key weighs 1. cost: float64 [keys], or empty where each costs 1. able: int32
    [keys], the search's number where a key may leave, or empty where all may. saved: nodes that the
    search changed, as they were before, each with the key saved before it as SAVED_AT; empty where
    nothing is taken back. clock: int64 [3]. future: int64 [requests], when the key of each is
    requested again. category: int32 [requests], from 0 on, or empty where unknown. reuse: float64
    [categories, 2], what was learned of each. rules: float64, the policy's parameters.
    """

    node: npt.NDArray[np.int32]
    head: npt.NDArray[np.int64]
    real: npt.NDArray[np.float64]
    rank: npt.NDArray[np.float64]
    size: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    able: npt.NDArray[np.int32]
    saved: npt.NDArray[np.int32]
    clock: npt.NDArray[np.int64]
    future: npt.NDArray[np.int64]
    category: npt.NDArray[np.int32]
    reuse: npt.NDArray[np.float64]
    rules: npt.NDArray[np.float64]


def own_column(lists: int) -> int:
    """First column of a policy's own numbers in `Queues.head`."""
    return _FIRST_LIST + 3 * lists


@part
def _save(node, saved, clock, k):
    if node[k, SAVED_AT] != clock[SERIAL]:
        for i in range(node.shape[1]):
            saved[k, i] = node[k, i]
        saved[k, SAVED_AT] = clock[SAVED]
        clock[SAVED] = k
        node[k, SAVED_AT] = clock[SERIAL]


@part
def put(q, k, field, value):
    """Set a field of a key."""
    if q.saved.shape[0] > 0:
        _save(q.node, q.saved, q.clock, k)
    q.node[k, field] = value


@part
def size_of(q, k):
    """Weight of a key."""
    return q.size[k] if q.size.shape[0] > 0 else 1


@part
def cost_of(q, k):
    """What it costs to bring a key back."""
    return q.cost[k] if q.cost.shape[0] > 0 else 1.0


@part
def may_leave(q, k):
    """Whether a search may name this key."""
    return q.able.shape[0] == 0 or q.able[k] == q.clock[SERIAL]


@part
def weight(q, d, which):
    """Weight of the keys in a list."""
    return q.head[d, _FIRST_LIST + 3 * which + 2]


@part
def oldest(q, d, which):
    """Key at the old end of a list, or -1."""
    return q.head[d, _FIRST_LIST + 3 * which]


@part
def newest(q, d, which):
    """Key at the new end of a list, or -1."""
    return q.head[d, _FIRST_LIST + 3 * which + 1]


@part
def attach(q, d, which, k, link):
    """Put a key at the new end of a list that is linked by the fields `link` and `link` + 1."""
    column = _FIRST_LIST + 3 * which
    last = q.head[d, column + 1]
    put(q, k, link, last)
    put(q, k, link + 1, -1)
    if last < 0:
        q.head[d, column] = k
    else:
        put(q, last, link + 1, k)
    q.head[d, column + 1] = k
    q.head[d, column + 2] = q.head[d, column + 2] + size_of(q, k)


@part
def detach(q, d, which, k, link):
    """Take a key out of the list that it is in by those fields."""
    column = _FIRST_LIST + 3 * which
    older, newer = q.node[k, link], q.node[k, link + 1]
    if older < 0:
        q.head[d, column] = newer
    else:
        put(q, older, link + 1, newer)
    if newer < 0:
        q.head[d, column + 1] = older
    else:
        put(q, newer, link, older)
    q.head[d, column + 2] = q.head[d, column + 2] - size_of(q, k)


@part
def push(q, d, which, k):
    """Put a key at the new end of a list."""
    put(q, k, PLACE, which)
    attach(q, d, which, k, OLDER)


@part
def unlink(q, d, k):
    """Take a key out of its list; it is then nowhere."""
    detach(q, d, q.node[k, PLACE], k, OLDER)
    put(q, k, PLACE, NOWHERE)


@part
def move(q, d, which, k):
    """Put a key, which is in some list, at the new end of a list."""
    detach(q, d, q.node[k, PLACE], k, OLDER)
    push(q, d, which, k)


@part
def oldest_able(q, d, which):
    """The oldest key of a list that may leave, or -1."""
    k = oldest(q, d, which)
    while k >= 0 and not may_leave(q, k):
        k = q.node[k, NEWER]
    return k


@part
def oldest_of_either(q, d, first, second):
    """The oldest key of the first list that may leave, else of the second, or -1."""
    k = oldest_able(q, d, first)
    return k if k >= 0 else oldest_able(q, d, second)


@part
def forget_oldest(q, d, which, limit):
    """Forget ghosts, the oldest first, until no more than `limit` are left."""
    while weight(q, d, which) > limit:
        unlink(q, d, oldest(q, d, which))


@part
def share(q, d, rule):
    """That fraction of the capacity, in whole weights."""
    return int(q.head[d, CAPACITY] * q.rules[rule])


# What a policy does where its own file says nothing.


@part
def hit(q, d, k):
    """A resident was requested."""


@part
def miss(q, d, k):
    """A key that is not resident was requested; a ghost leaves its list here."""


@part
def miss_again(q, d, k):
    """A key that missed, and was not admitted since, was requested: it is `AWAITED`, and stays."""


@part
def refuses(q, d, k):
    """Whether a key that missed does not come in, since who would have to leave is worth more."""
    return False


@part
def drop(q, d, k):
    """A key, whatever is known of it, is gone for good."""
    if q.node[k, PLACE] >= 0:
        unlink(q, d, k)
