"""libCacheSim, request by request, where it is installed (extra `oracle`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Keys = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

_NEVER = 2**63 - 1
_HASHPOWER = 16
"""The default reserves hundreds of MB."""

EXACT: dict[str, tuple[str, dict[str, int]]] = {
    "fifo": ("FIFO", {}),
    "lru": ("LRU", {}),
    "clock": ("Clock", {}),
    "clock, 2 bits": ("Clock", {"n_bit_counter": 2}),
    "lfu": ("LFU", {}),
    "sieve": ("Sieve", {}),
    "arc": ("ARC", {}),
    "s3-fifo, 2 uses": ("S3FIFO", {"move_to_main_threshold": 2}),
    "s3-fifo": ("S3FIFO", {"move_to_main_threshold": 1}),
    "belady, all in": ("Belady", {}),
    "2q": ("TwoQ", {}),
}
"""Policies that must agree on every request, with libCacheSim's name and parameters."""

CLOSE: dict[str, tuple[str, dict[str, int]]] = {
    "lirs": ("LIRS", {}),
    "slru": ("SLRU", {}),
    "gdsf": ("GDSF", {}),
}
"""Policies of which libCacheSim has another dialect: hit ratios are near each other."""


def hits_of(
    name: str,
    keys: Keys,
    capacity: int,
    future: npt.NDArray[np.int64] | None = None,
    sizes: npt.NDArray[np.int64] | None = None,
) -> Flags:
    """Whether each request is a hit, by libCacheSim's policy `name`; skips where it is missing."""
    library = pytest.importorskip("libcachesim")
    of_library, parameters = {**EXACT, **CLOSE}[name]
    cache: Any = getattr(library, of_library)(capacity, hashpower=_HASHPOWER, **parameters)
    request: Any = library.Request()
    request.op = library.ReqOp.OP_GET
    request.obj_size = 1
    hits = np.empty(len(keys), np.bool_)
    for i, key in enumerate(keys.tolist()):
        request.obj_id = key
        if sizes is not None:
            request.obj_size = int(sizes[key])
        if future is not None:
            request.next_access_vtime = int(future[i]) if future[i] < 2**62 else _NEVER
        hits[i] = cache.get(request)
    return hits
