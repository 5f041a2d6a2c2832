"""GDSF that knows which kinds of requests come back (after Wang et al., ATC 2025)."""

from tierstore.arguments import is_number
from tierstore.errors import ConfigError
from tierstore.kernels.jit import part
from tierstore.policies.queues import gdsf
from tierstore.policies.queues.base import QueuePolicy
from tierstore.policies.queues.gdsf import age_of, worth
from tierstore.policies.queues.heap import HEAP_FIELDS, heap_drop, heap_enter, heap_move
from tierstore.policies.queues.lists import COUNT, OWN_FIELD, TIME, put
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1
_LAST = OWN_FIELD + HEAP_FIELDS
"""Category of a key's last use."""
_USED, _REUSED = range(2)
_DECAY = 0
evict = gdsf.evict
drop = heap_drop


@part
def _learn(q, k):
    """A key was used by a request of some category."""
    if q.category.shape[0] == 0:
        return
    last, now = q.node[k, _LAST], q.category[q.clock[TIME]]
    if last >= 0:
        q.reuse[last, _REUSED] += 1
    q.reuse[now, _USED] = q.reuse[now, _USED] * q.rules[_DECAY] + 1
    q.reuse[now, _REUSED] *= q.rules[_DECAY]
    put(q, k, _LAST, now)


@part
def _priority(q, d, k):
    if q.category.shape[0] == 0:
        return age_of(q, d) + worth(q, k)
    used, reused = q.reuse[q.node[k, _LAST], _USED], q.reuse[q.node[k, _LAST], _REUSED]
    return age_of(q, d) + min(1.0, (reused + 1) / (used + 2)) * worth(q, k)


@part
def hit(q, d, k):
    _learn(q, k)
    put(q, k, COUNT, q.node[k, COUNT] + 1)
    heap_move(q, d, k, _priority(q, d, k))


@part
def miss(q, d, k):
    _learn(q, k)


@part
def insert(q, d, k):
    put(q, k, COUNT, 1)
    heap_enter(q, d, k, _priority(q, d, k))


class WorkloadAware(QueuePolicy):
    """Evicts the lowest age + reuse x uses x cost / size, where age is the last evicted priority.

    Reuse is that of the category of the block's last use: the share of the category's uses of
    blocks that some request used again, whether or not the block was still there. It is learned on
    the way, as (reused + 1) / (used + 2), 1/2 at first and 1 at most; both counts shrink by `decay`
    with each use by the category. A block's priority is set when it is used, and learning later
    does not change it. Among equals the one that got its priority first goes, so with blocks
    touched from leaf to root a chain goes from its leaf on.

    Categories, sizes and costs are those of a trace. A store says none: there, and for a trace
    without categories, reuse is 1, which makes this GDSF. O(log n) amortised.

    Parameters
    ----------
    decay: what a category's counts keep with each of its uses, in (0, 1]; it remembers about
        1 / (1 - decay) uses.
    """

    lists = 1
    numbers = (0,)
    own_fields = HEAP_FIELDS + 1
    is_ranked = True
    loops = compile_loops(globals())

    def __init__(self, decay: float = 0.9999) -> None:
        if not (is_number(decay) and 0 < decay <= 1):
            raise ConfigError(f"decay={decay!r}: expected a factor in (0, 1]")
        super().__init__(decay)
