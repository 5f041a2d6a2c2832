"""What a kernel could reach: the time of its bytes at stream speed, and of its work in a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.kernels.threads import over_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.interfaces import Ids
    from tierstore.kernels.element import Array

try:
    from tierstore.benchmarks import kernel_loops as loops
except ImportError:  # Numba has no build for every Python; `run` then says so.
    loops = None  # type: ignore[assignment]

_SHARES = 16
_ELEMENTS = 2048
_ONE = 0x3F80
"""1.0 in bfloat16."""


class Work(NamedTuple):
    """Work that needs no memory.

    Attributes
    ----------
    says: what it is, and how much.
    run: does some of it, on one thread.
    share: how many times that the kernel does.
    """

    says: str
    run: Callable[[], object]
    share: float


class Move(NamedTuple):
    """Bytes that a kernel must read, or copy, and a loop that does nothing else."""

    says: str
    run: Callable[[], object]


def stream(nbytes: int) -> Move:
    """Reads so many bytes, one after the other."""
    words = np.ones((_SHARES, max(1, nbytes // (8 * _SHARES))), np.int64)
    return Move(
        "stream",
        lambda: over_rows(
            _SHARES, nbytes, lambda first, last: loops.add_up(words, first, last)
        ),
    )  # fmt: skip


def blocks(rows: Array, places: Ids) -> Move:
    """Reads rows that lie anywhere; a row is a multiple of 8 bytes."""
    words = rows.view(np.int64)
    return Move(
        "blocks anywhere",
        lambda: over_rows(
            len(places), len(places) * words.shape[1] * 8,
            lambda first, last: loops.add_up_rows(words, places, first, last),
        ),
    )  # fmt: skip


def copies(rows: Array, places: Ids, target: Array, into: Ids) -> Move:
    """Copies rows from anywhere to anywhere, on one thread."""
    source, words = rows.view(np.int64), target.view(np.int64)
    return Move("copies anywhere", lambda: loops.copy_words(source, places, words, into))


def multiply_adds(amount: float, group: int) -> Work:
    """So many, of 16-bit elements that are widened once for `group` queries."""
    group = min(group, 4)
    elements = np.full(_ELEMENTS, _ONE, np.uint16)
    queries = np.ones((4, _ELEMENTS), np.float32)
    run, repeat = loops.multiply_adds(group), 64
    return Work(
        "multiply-adds", lambda: run(elements, queries, repeat),
        amount / (_ELEMENTS * repeat * group),
    )  # fmt: skip


def exponentials(amount: float) -> Work:
    values = -np.ones(_ELEMENTS, np.float32)
    return Work("exponentials", lambda: loops.exponentials(values, 64), amount / (_ELEMENTS * 64))


def compares(amount: float) -> Work:
    codes, asked = np.ones((2, _ELEMENTS), np.int16)
    return Work("compares", lambda: loops.compares(codes, asked, 64), amount / (_ELEMENTS * 64))


def picks(amount: float) -> Work:
    keys = np.random.default_rng(0).integers(0, 1 << 32, _ELEMENTS, dtype=np.uint32)
    bins, picked = np.zeros(2048, np.int64), np.empty(_ELEMENTS + 1, np.int32)
    cut = np.uint32(63 << 26)
    return Work(
        "counts and picks", lambda: loops.counts_and_picks(keys, bins, cut, picked, 16),
        amount / (_ELEMENTS * 16),
    )  # fmt: skip


def products(amount: float, length: int) -> Work:
    """Multiply-adds of float32 matrices, tile by tile."""
    left = np.ones((8, length), np.float32)
    right = np.ones((length, loops.COLUMNS), np.float32)
    out = np.empty((8, loops.COLUMNS), np.float32)
    return Work(
        "products", lambda: loops.products(left, right, out, 64),
        amount / (8 * length * loops.COLUMNS * 64),
    )  # fmt: skip


def comparisons(points: float, dim: int, clusters: int) -> Work:
    """Of so many points with all clusters each."""
    own = np.ones((dim, loops.POINTS), np.float32)
    centroids = np.ones((clusters, dim), np.float32)
    offsets, out = np.zeros(clusters, np.float32), np.empty(loops.POINTS, np.int64)
    return Work(
        "comparisons", lambda: loops.comparisons(own, centroids, offsets, out, 256),
        points / (loops.POINTS * 256),
    )  # fmt: skip


def scattered(vectors: Array, count: int) -> Work:
    """Products of one query with `count` vectors of each row that lie anywhere."""
    places = np.random.default_rng(1).integers(0, vectors.shape[1], (len(vectors), count), np.int32)
    query = np.ones(vectors.shape[2], np.float32)
    return Work(
        "scattered reads", lambda: loops.scattered(query, vectors, places, 0, len(vectors)), 1.0
    )


def in_cache(run: Callable[[], object], share: float) -> Work:
    """The kernel itself on so little that it stays in a cache."""
    return Work("itself in a cache", run, share)
