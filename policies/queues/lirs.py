"""LIRS (Jiang and Zhang, SIGMETRICS 2002): how long between two uses decides, not how long ago."""

from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy, checked_share
from tierstore.policies.queues.lists import (
    CAPACITY,
    COUNT,
    NOWHERE,
    OLDER,
    OWN_FIELD,
    PLACE,
    attach,
    detach,
    may_leave,
    oldest,
    own_column,
    put,
    share,
    size_of,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

# PLACE is a state here. A key of state _LOW is in the stack; _HIGH is in the queue and may be in
# the stack; _GHOST is in the stack and among the ghosts, which use the links of the queue.
RESIDENT = 2
_LOW, _HIGH, _GHOST = range(3)
_STACK, _QUEUE, _GHOSTS = range(3)
_LINK, _IN_STACK = OWN_FIELD, OWN_FIELD + 2
_LOW_WEIGHT = own_column(3)
_QUEUE_SHARE, _GHOST_SHARE = range(2)


@part
def _low_limit(q, d):
    return q.head[d, CAPACITY] - max(1, share(q, d, _QUEUE_SHARE))


@part
def _push_stack(q, d, k):
    put(q, k, _IN_STACK, 1)
    attach(q, d, _STACK, k, OLDER)


@part
def _leave_stack(q, d, k):
    put(q, k, _IN_STACK, -1)
    detach(q, d, _STACK, k, OLDER)


@part
def _set_low(q, d, k, sign):
    q.head[d, _LOW_WEIGHT] = q.head[d, _LOW_WEIGHT] + sign * size_of(q, k)


@part
def _prune(q, d):
    """The bottom of the stack is a low one."""
    k = oldest(q, d, _STACK)
    while k >= 0 and q.node[k, PLACE] != _LOW:
        _leave_stack(q, d, k)
        if q.node[k, PLACE] == _GHOST:
            detach(q, d, _GHOSTS, k, _LINK)
            put(q, k, PLACE, NOWHERE)
        k = oldest(q, d, _STACK)


@part
def _become_low(q, d, k):
    """Put a key on top of the stack as a low one, and demote those that are too many."""
    put(q, k, PLACE, _LOW)
    _push_stack(q, d, k)
    _set_low(q, d, k, 1)
    while q.head[d, _LOW_WEIGHT] > _low_limit(q, d):
        _prune(q, d)
        bottom = oldest(q, d, _STACK)
        _leave_stack(q, d, bottom)
        _set_low(q, d, bottom, -1)
        put(q, bottom, PLACE, _HIGH)
        attach(q, d, _QUEUE, bottom, _LINK)
    _prune(q, d)


@part
def hit(q, d, k):
    if q.node[k, PLACE] == _LOW:
        _leave_stack(q, d, k)
        _push_stack(q, d, k)
        _prune(q, d)
        return
    detach(q, d, _QUEUE, k, _LINK)
    if q.node[k, _IN_STACK] == 1:
        _leave_stack(q, d, k)
        _become_low(q, d, k)
    else:
        _push_stack(q, d, k)
        attach(q, d, _QUEUE, k, _LINK)
        _prune(q, d)


@part
def miss(q, d, k):
    put(q, k, COUNT, _HIGH)
    if q.node[k, PLACE] == _GHOST:
        detach(q, d, _GHOSTS, k, _LINK)
        _leave_stack(q, d, k)
        put(q, k, PLACE, NOWHERE)
        put(q, k, COUNT, _LOW)


@part
def insert(q, d, k):
    fits = q.head[d, _LOW_WEIGHT] + size_of(q, k) <= _low_limit(q, d)
    if q.node[k, COUNT] == _LOW or fits:
        _become_low(q, d, k)
        return
    put(q, k, PLACE, _HIGH)
    _push_stack(q, d, k)
    attach(q, d, _QUEUE, k, _LINK)
    _prune(q, d)


@part
def _oldest_by(q, d, which, link):
    """The oldest resident of a list that may leave, or -1."""
    k = oldest(q, d, which)
    while k >= 0 and (q.node[k, PLACE] == _GHOST or not may_leave(q, k)):
        k = q.node[k, link + 1]
    return k


@part
def _forget_ghosts(q, d):
    while weight(q, d, _GHOSTS) > share(q, d, _GHOST_SHARE):
        k = oldest(q, d, _GHOSTS)
        detach(q, d, _GHOSTS, k, _LINK)
        _leave_stack(q, d, k)
        put(q, k, PLACE, NOWHERE)


@part
def evict(q, d):
    k = _oldest_by(q, d, _QUEUE, _LINK)
    if k < 0:
        k = _oldest_by(q, d, _STACK, OLDER)
        drop(q, d, k)
        return k
    detach(q, d, _QUEUE, k, _LINK)
    if q.node[k, _IN_STACK] == 1:
        put(q, k, PLACE, _GHOST)
        attach(q, d, _GHOSTS, k, _LINK)
        _forget_ghosts(q, d)
    else:
        put(q, k, PLACE, NOWHERE)
    return k


@part
def drop(q, d, k):
    place = q.node[k, PLACE]
    if place < 0:
        return
    if place == _LOW:
        _set_low(q, d, k, -1)
    else:
        detach(q, d, _QUEUE if place == _HIGH else _GHOSTS, k, _LINK)
    if q.node[k, _IN_STACK] == 1:
        _leave_stack(q, d, k)
    put(q, k, PLACE, NOWHERE)
    _prune(q, d)


class LIRS(QueuePolicy):
    """Keeps what came back soon after its use before (low), and a few others in a queue (high).

    Parameters
    ----------
    queue: share of the capacity for the queue, at least one block.
    ghosts: as many blocks that left the queue are remembered at most, in capacities; beyond that
        the one that left first is forgotten.
    """

    lists = 3
    numbers = (0,)
    own_fields = 3
    loops = compile_loops(globals())

    def __init__(self, queue: float = 0.01, ghosts: float = 2.0) -> None:
        super().__init__(checked_share("queue", queue), checked_share("ghosts", ghosts, most=8.0))
