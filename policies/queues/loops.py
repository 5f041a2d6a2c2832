"""The loops that every queue policy has, compiled into the file of the policy."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierstore.kernels.jit import counting_free, part
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
    miss_again,
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

    It has RESIDENT, `insert` and `evict`, and may have its own `hit`, `miss`, `miss_again`,
    `refuses` and `drop`. Numba keeps a loop on disk only if the functions that it calls are its
    globals. So each loop is made over as if it stood in the policy's file; its name tells what all
    the parts were. Where a part is in no file, as in a notebook, nothing is kept.
    """
    names = {**vars(lists), **globals(), **policy}
    loops = (_request, _touch, _admit, _choose, _remove, _take_back)
    home = policy.get("__file__")
    parts = _Parts()
    for loop in loops:
        parts.add_function(FunctionType(loop.__code__, names))
    version = parts.version(home)
    if version is None:
        return Loops(*(part(FunctionType(loop.__code__, names)) for loop in loops))

    def in_file_of_policy(loop: Any) -> Callable[..., None]:
        name = f"{loop.__name__}_{version}"
        code = loop.__code__.replace(co_filename=home, co_name=name, co_qualname=name)
        return counting_free(FunctionType(code, names))

    return Loops(*(in_file_of_policy(loop) for loop in loops))


class _Parts:
    """All that a function is compiled from: files of functions and modules, and plain numbers.

    A number is compiled in wherever it was imported from, so it counts by itself.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._numbers: set[str] = set()
        self._seen: set[object] = set()

    def version(self, home: str | None) -> str | None:
        """A name for just these parts, with the file `home`; None if one is in no file."""
        files = sorted({home or "", *self._files})
        if not all(Path(file).is_file() for file in files):
            return None
        texts = [Path(file).read_bytes() for file in files]
        numbers = "\n".join(sorted(self._numbers)).encode()
        return hashlib.sha256(b"".join([*texts, numbers])).hexdigest()[:16]

    def add_function(self, function: FunctionType) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        self._files.add(function.__code__.co_filename)
        used = function.__code__.co_names
        for name in used:
            if name in function.__globals__:
                self._add(name, function.__globals__[name], used)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._add(name, cell.cell_contents, used)

    def _add(self, name: str, value: object, used: tuple[str, ...]) -> None:
        """used: names in the function, among them what it takes from a module."""
        source = getattr(value, "py_func", None)
        if isinstance(source, FunctionType):
            self.add_function(source)
        elif isinstance(value, ModuleType):
            self._add_module(value, used)
        elif isinstance(value, np.ndarray):
            self._numbers.add(f"{name} {value.dtype} {value.shape} {value.tobytes()!r}")
        elif isinstance(value, int | float | complex | str | bytes | tuple | np.generic):
            self._numbers.add(f"{name} {value!r}")

    def _add_module(self, module: ModuleType, used: tuple[str, ...]) -> None:
        if (module, used) in self._seen:
            return
        self._seen.add((module, used))
        file = getattr(module, "__file__", None)
        if file is not None:
            self._files.add(file)
        for name in used:
            if hasattr(module, name):
                self._add(name, getattr(module, name), used)


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
            elif q.node[k, PLACE] == AWAITED:
                miss_again(q, d, k)
            else:
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
