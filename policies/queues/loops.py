"""The loops that every queue policy has, compiled into the file of the policy."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from tierstore.kernels.jit import counting_free
from tierstore.policies.queues import lists
from tierstore.policies.queues.lists import (
    AWAITED,
    CAPACITY,
    DOMAIN,
    NOWHERE,
    PLACE,
    SAVED,
    SAVED_AT,
    TIME,
    USED,
    drop,
    hit,
    miss,
    put,
    refuses,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RESIDENT: int
"""Lists of the policy that hold residents."""
insert: Callable[..., None]
evict: Callable[..., int]


class Loops(NamedTuple):
    """A policy's functions, for many keys at once."""

    request: Callable[..., None]
    touch: Callable[..., None]
    admit: Callable[..., None]
    choose: Callable[..., None]
    remove: Callable[..., None]
    take_back: Callable[..., None]


def compile_loops(policy: Mapping[str, Any]) -> Loops:
    """The loops of a policy whose functions are the globals `policy` of its file.

    It has RESIDENT, `insert` and `evict`, and may have its own `hit`, `miss`, `refuses` and `drop`.
    Numba keeps a loop on disk only if the functions that it calls are its globals. So each loop is
    made over as if it stood in the policy's file; its name tells what all the parts were.
    """
    names = {**vars(lists), **globals(), **policy}
    compiled = [value.py_func for value in names.values() if hasattr(value, "py_func")]
    parts = sorted({__file__, *(function.__code__.co_filename for function in compiled)})
    version = hashlib.sha256(b"".join(Path(part).read_bytes() for part in parts)).hexdigest()[:16]

    def in_file_of_policy(loop: Any) -> Callable[..., None]:
        name = f"{loop.__name__}_{version}"
        code = loop.__code__.replace(co_filename=policy["__file__"], co_name=name, co_qualname=name)
        return counting_free(FunctionType(code, names))

    loops = (_request, _touch, _admit, _choose, _remove, _take_back)
    return Loops(*(in_file_of_policy(loop) for loop in loops))


def _request(q, d, keys, hits):
    """Get or insert each key, one after the other."""
    capacity = q.head[d, CAPACITY]
    for i in range(keys.shape[0]):
        k = keys[i]
        q.node[k, DOMAIN] = d
        if 0 <= q.node[k, PLACE] < RESIDENT:
            hit(q, d, k)
            hits[i] = True
        elif size_of(q, k) <= capacity:
            miss(q, d, k)
            room = capacity - size_of(q, k)
            if q.head[d, USED] <= room or not refuses(q, d, k):
                while q.head[d, USED] > room:
                    q.head[d, USED] -= size_of(q, evict(q, d))
                insert(q, d, k)
                q.head[d, USED] += size_of(q, k)
        q.clock[TIME] += 1


def _touch(q, keys):
    """Keys were used, resident or not; one that was never admitted means nothing."""
    for i in range(keys.shape[0]):
        k = keys[i]
        d = q.node[k, DOMAIN]
        if d >= 0:
            if 0 <= q.node[k, PLACE] < RESIDENT:
                hit(q, d, k)
            elif q.node[k, PLACE] != AWAITED:
                miss(q, d, k)
                put(q, k, PLACE, AWAITED)
        q.clock[TIME] += 1


def _admit(q, domains, keys):
    """Keys came in, where they are not already."""
    for i in range(keys.shape[0]):
        k, d = keys[i], domains[i]
        if 0 <= q.node[k, PLACE] < RESIDENT:
            continue
        put(q, k, DOMAIN, d)
        if q.node[k, PLACE] != AWAITED:
            miss(q, d, k)
        insert(q, d, k)
        q.head[d, USED] = q.head[d, USED] + size_of(q, k)
        q.clock[TIME] += 1


def _choose(q, domains, need, out):
    """Evict ``need[i]`` keys from each domain."""
    at = 0
    for i in range(domains.shape[0]):
        d = domains[i]
        for _ in range(need[i]):
            out[at] = evict(q, d)
            q.head[d, USED] = q.head[d, USED] - size_of(q, out[at])
            at += 1


def _remove(q, keys):
    """Keys are gone for good, from lists of residents and of ghosts."""
    for i in range(keys.shape[0]):
        k = keys[i]
        d = q.node[k, DOMAIN]
        if d >= 0:
            if 0 <= q.node[k, PLACE] < RESIDENT:
                q.head[d, USED] = q.head[d, USED] - size_of(q, k)
            drop(q, d, k)
            put(q, k, PLACE, NOWHERE)


def _take_back(q):
    """Every key that the search changed is what it was before."""
    k = q.clock[SAVED]
    while k >= 0:
        following = q.saved[k, SAVED_AT]
        for i in range(q.node.shape[1]):
            q.node[k, i] = q.saved[k, i]
        q.node[k, SAVED_AT] = -1
        k = following
