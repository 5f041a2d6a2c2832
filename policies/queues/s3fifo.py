"""S3-FIFO (Yang et al., SOSP 2023), in the form that libCacheSim has since December 2024."""

from tierstore.arguments import check_whole
from tierstore.kernels.jit import part
from tierstore.policies.queues.base import QueuePolicy, checked_share
from tierstore.policies.queues.lists import (
    CAPACITY,
    COUNT,
    NEWER,
    PLACE,
    forget_oldest,
    may_leave,
    move,
    oldest,
    own_column,
    push,
    put,
    share,
    unlink,
    weight,
)
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 2
_SMALL, _MAIN, _GHOSTS = range(3)
_SMALL_SHARE, _GHOST_SHARE, _PROMOTE_AT = range(3)
_MOST_USES = 3
_IS_FULL = own_column(3)


@part
def _small(q, d):
    return max(1, share(q, d, _SMALL_SHARE))


@part
def hit(q, d, k):
    if q.node[k, COUNT] < _MOST_USES:
        put(q, k, COUNT, q.node[k, COUNT] + 1)


@part
def miss(q, d, k):
    put(q, k, COUNT, _SMALL)
    if q.node[k, PLACE] == _GHOSTS:
        unlink(q, d, k)
        put(q, k, COUNT, _MAIN)


@part
def insert(q, d, k):
    place = q.node[k, COUNT]
    # Nothing is filtered as long as nothing has to leave.
    if not q.head[d, _IS_FULL] and weight(q, d, _SMALL) >= _small(q, d):
        place = _MAIN
    put(q, k, COUNT, 0)
    push(q, d, place, k)


@part
def _evict_small(q, d):
    k = oldest(q, d, _SMALL)
    while k >= 0:
        newer = q.node[k, NEWER]
        if may_leave(q, k):
            if q.node[k, COUNT] < q.rules[_PROMOTE_AT]:
                move(q, d, _GHOSTS, k)
                forget_oldest(q, d, _GHOSTS, share(q, d, _GHOST_SHARE))
                return k
            put(q, k, COUNT, 0)
            move(q, d, _MAIN, k)
        k = newer
    return -1


@part
def _evict_main(q, d):
    k = oldest(q, d, _MAIN)
    is_able = False
    while k >= 0:
        newer = q.node[k, NEWER]
        if may_leave(q, k):
            is_able = True
            if q.node[k, COUNT] == 0:
                unlink(q, d, k)
                return k
            put(q, k, COUNT, q.node[k, COUNT] - 1)
            move(q, d, _MAIN, k)
        k = newer if newer >= 0 or not is_able else oldest(q, d, _MAIN)
    return -1


@part
def evict(q, d):
    q.head[d, _IS_FULL] = 1
    while True:
        main_is_over = weight(q, d, _MAIN) > q.head[d, CAPACITY] - _small(q, d)
        k = _evict_main(q, d) if main_is_over else _evict_small(q, d)
        if k < 0:
            k = _evict_small(q, d) if main_is_over else _evict_main(q, d)
        if k >= 0:
            return k


class S3FIFO(QueuePolicy):
    """A small FIFO that filters, a main one with second chances, and ghosts.

    Parameters
    ----------
    small: share of the capacity that is the small queue, at least one block.
    ghosts: as many blocks that left the small queue are remembered, as a share of the capacity.
    promote_at: uses in the small queue that take a block to the main one. The paper has 2; for
        blocks of data, which come back later, 1 is often better.
    """

    lists = 3
    numbers = (0,)
    loops = compile_loops(globals())

    def __init__(self, small: float = 0.1, ghosts: float = 0.9, promote_at: int = 1) -> None:
        super().__init__(
            checked_share("small", small),
            checked_share("ghosts", ghosts, most=8.0),
            check_whole("promote_at", promote_at, 1, _MOST_USES),
        )
