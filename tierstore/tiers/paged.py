"""A memory-mapped tier that decides itself how much of its file stays in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from tierstore.sizes import parse_size
from tierstore.tiers.mmap import MmapTier

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import numpy.typing as npt

    from tierstore.interfaces import Bytes, Completion, Ids, Pointers
    from tierstore.layout import BlockLayout

_PAGE = mmap.PAGESIZE
_ASKED_AT_ONCE = (128 << 10) // _PAGE
"""Pages of one request; of a longer one Linux would read the beginning only."""
_BATCHES = 16
"""Pages leave in batches of 1/16 of the cache: finding the oldest costs O(pages)."""
_TABLE_BYTES = 9
"""What is kept for each page of the file."""


class PagedTier(MmapTier):
    """Blocks in a mapped file, of which at most `cache` bytes stay in the system's page cache.

    A read asks for all the pages that it lacks before it waits for the first, and `expect` asks
    for as many as may stay and does not wait at all. The pages used longest ago leave, after a
    read, so that what one reads comes on top until it has, and before pages are expected. What is
    in the cache is a matter of speed alone: the map always has the right bytes.

    Parameters
    ----------
    cache: bytes of pages that stay, with the tables that count them.
    limit: most bytes of the file; None for what the file system has.
    """

    def __init__(
        self,
        layout: BlockLayout,
        path: str | Path,
        cache: int | str,
        limit: int | str | None = None,
        *,
        name: str = "disk",
    ) -> None:
        self._cache_bytes = parse_size(cache, "cache")
        self._used: Ids = np.empty(0, np.int32)
        """Number of the last call that used each page; -1 for one that is not in memory."""
        self._is_coming: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        """Whether each page was expected and not read since: the system may not have it yet."""
        self.asked: Ids = np.empty(0, np.int32)
        """How often each page had to be asked of the disk: the stalls."""
        self._held = 0
        self._call = 0
        self._is_dirty = False
        self._counting = threading.Lock()
        super().__init__(layout, path, limit, name=name)

    @property
    def medium(self) -> str:
        return "mapped file, its pages counted"

    @property
    def cache_bytes(self) -> int:
        """Bytes of pages that stay in memory, with the tables that count them."""
        return self._cache_bytes

    @cache_bytes.setter
    def cache_bytes(self, nbytes: int) -> None:
        with self._counting:
            self._cache_bytes = nbytes
            self._trim(1)

    def resize(self, slots: int) -> None:
        super().resize(slots)
        pages = -(-slots * self.layout.block_bytes // _PAGE)
        kept = min(pages, len(self._used))
        used: Ids = np.full(pages, -1, np.int32)
        used[:kept] = self._used[:kept]
        is_coming = np.zeros(pages, np.bool_)
        is_coming[:kept] = self._is_coming[:kept]
        asked: Ids = np.zeros(pages, np.int32)
        asked[:kept] = self.asked[:kept]
        self._used, self._is_coming, self.asked = used, is_coming, asked
        self._held = int((used >= 0).sum())
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        pages = self._pages(slots)
        with self._counting:
            self._ask(self._use(pages))
        done = super().read(slots, out, rows, parts)
        with self._counting:
            self._is_coming[pages] = False
            self._trim(_BATCHES)
        return done

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        done = super().write(slots, blocks, rows, parts)
        with self._counting:
            self._use(self._pages(slots))
            self._is_dirty = True
            self._trim(_BATCHES)
        return done

    def expect(self, slots: Ids) -> None:
        with self._counting, suppress(OSError):  # a read says what is wrong, if anything
            room = self._room
            missing = self._use(self._pages(slots)[: room - room // _BATCHES])
            self._trim(_BATCHES)
            self._is_coming[missing] = True
            self._ask(missing)

    def drop_cache(self) -> None:
        """Have no page of the file in memory."""
        with self._counting:
            self._drop(np.arange(len(self._used), dtype=np.int64))

    def cached_bytes(self) -> int:
        """Bytes of the file that the system has in memory now, as it says itself."""
        if self._map is None:
            return 0
        size = len(self._used) * _PAGE
        state = np.zeros(len(self._used), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self._view.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(size), state.ctypes.data_as(ctypes.c_void_p)):
            raise OSError(ctypes.get_errno(), f"{self.name}: mincore")
        return int((state & 1).sum()) * _PAGE

    # Pages

    def _pages(self, slots: Ids) -> Pointers:
        """The pages of blocks, in order."""
        first, last = page_range(slots, self.layout.block_bytes)
        pages = first
        if (span := int((last - first).max(initial=0))) > 0:
            each = first[:, None] + np.arange(span + 1)
            pages = each[each <= last[:, None]]
        return np.unique(pages)

    def _use(self, pages: Pointers) -> Pointers:
        """Note that pages are used; returns those that were not in memory."""
        self._call += 1
        missing: Pointers = pages[self._used[pages] < 0]
        self._used[pages] = self._call
        self._held += len(missing)
        return missing

    def _ask(self, pages: Pointers) -> None:
        """Have the system begin to read pages, those next to each other together."""
        self.asked[pages] += 1
        if self._map is None or len(pages) == 0:
            return
        ask = self._map.madvise
        for start, count in runs(pages, _ASKED_AT_ONCE):
            ask(mmap.MADV_WILLNEED, start * _PAGE, count * _PAGE)

    @property
    def _room(self) -> int:
        """Pages that may stay in memory."""
        return max(0, (self._cache_bytes - _TABLE_BYTES * len(self._used)) // _PAGE)

    def _trim(self, batches: int) -> None:
        """Let pages go that are too many, and in all batches but one some more."""
        room = self._room
        over = self._held - room
        if over <= 0:
            return
        held = np.flatnonzero(self._used >= 0)
        count = min(len(held), over + (room // batches if batches > 1 else 0))
        oldest = np.argpartition(self._used[held], count - 1)[:count]
        self._drop(np.sort(held[oldest]))

    def _drop(self, pages: Pointers) -> None:
        """Take pages out of memory; what was not on disk goes there first."""
        if self._map is None or not len(pages):
            return
        coming = pages[self._is_coming[pages]]
        if len(coming):  # the system drops no page that it is reading: wait for it
            np.frombuffer(self._map, np.uint8)[coming * _PAGE].max()
            self._is_coming[coming] = False
        if self._is_dirty:
            os.fdatasync(self._file.fd)
            self._is_dirty = False
        for start, count in runs(pages, 1 << 30):
            self._map.madvise(mmap.MADV_DONTNEED, start * _PAGE, count * _PAGE)
            os.posix_fadvise(self._file.fd, start * _PAGE, count * _PAGE, os.POSIX_FADV_DONTNEED)
        self._used[pages] = -1
        self._held = int((self._used >= 0).sum())

    def close(self) -> None:
        super().close()
        self._used, self.asked = self._used[:0], self.asked[:0]
        self._is_coming, self._held = self._is_coming[:0], 0


def page_range(slots: Ids, block_bytes: int) -> tuple[Pointers, Pointers]:
    """First and last page of each block."""
    start = slots.astype(np.int64) * block_bytes
    return start // _PAGE, (start + block_bytes - 1) // _PAGE


def runs(pages: Pointers, most: int) -> list[tuple[int, int]]:
    """Where pages in order stand next to each other: the first, and how many, at most `most`."""
    if not len(pages):
        return []
    breaks: npt.NDArray[np.intp] = np.flatnonzero(np.diff(pages) > 1) + 1
    starts = pages[np.concatenate([[0], breaks])]
    counts = np.diff(np.concatenate([[0], breaks, [len(pages)]]))
    if counts.max() <= most:
        return list(zip(starts.tolist(), counts.tolist(), strict=True))
    return [
        (start + at, min(most, count - at))
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for at in range(0, count, most)
    ]
