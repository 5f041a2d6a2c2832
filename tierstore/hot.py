"""Copies of values in memory, in front of a volume: slabs of equal slots, the coldest leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError
from tierstore.kernels import keys as kernels
from tierstore.kernels.threads import over_rows
from tierstore.memory import HostBuffer
from tierstore.sizes import format_size
from tierstore.volume.format import LIVE, PAGE, extent_size
from tierstore.volume.space import FreePlaces

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Ids, Pointers
    from tierstore.volume.records import Records, Visited

_SLABS = 32
_SMALLEST_SLAB = 1 << 16
_BATCHES = 64
_TABLE_BYTES_PER_PAGE = 8


class HotCache:
    """Values of records, each at a page of one buffer; `records.cached` says at which.

    A slab holds slots of one size. A value larger than a slab, 1/32 of the limit, is not kept. The
    volume's lock guards it; bytes of pinned records may be read without it.

    Invariant: a page that begins a slot is free, or holds the value of one place.
    """

    name = "dram"

    def __init__(self, limit_bytes: int, records: Records) -> None:
        self.slab_pages, slabs = _slabs(limit_bytes)
        pages = slabs * self.slab_pages
        self.limit_bytes = limit_bytes
        buffer = HostBuffer(pages * PAGE, self.name)
        buffer.resize(pages * PAGE)
        self.bytes: Bytes = buffer.array
        self.evictions = 0
        self._records = records
        self._place_of: Ids = np.full(pages, -1, np.int32)
        self._blank = list(range(slabs))[::-1]
        self._slabs: dict[int, list[int]] = {}
        self._free: dict[int, FreePlaces] = {}

    @staticmethod
    def check_limit(limit_bytes: int) -> None:
        """ConfigError if a limit is too small for anything."""
        _slabs(limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold a value, and of the tables."""
        slots = sum(
            size * int((self._place_of[self._pages(size)] >= 0).sum()) for size in self._slabs
        )
        return slots + len(self._place_of) * _TABLE_BYTES_PER_PAGE

    @property
    def largest(self) -> int:
        """Most bytes of a value that is kept."""
        return self.slab_pages * PAGE

    def keep(self, place: int, value: memoryview) -> bool:
        """Copy the value of a live record that has no copy yet; whether there was room.

        Others that are used less are evicted for it.
        """
        records, size = self._records, extent_size(value.nbytes)
        if size > self.largest or records.cached[place] >= 0:
            return False
        if records.rows["state"][place] != LIVE:
            return False
        free = self._free.setdefault(size, FreePlaces())
        while not len(free):
            if not self._make_room(size):
                return False
        page = int(free.pop(1)[0])
        start = page * PAGE
        self.bytes[start : start + value.nbytes] = np.frombuffer(value, np.uint8)
        self._place_of[page] = place
        records.cached[place] = page
        return True

    def unlink(self, places: Pointers) -> None:
        """Free the copies of places, as far as they have one; nobody may be reading them."""
        places = places[self._records.cached[places] >= 0]
        pages: Pointers = self._records.cached[places].astype(np.int64)
        self._records.cached[places] = -1
        self._place_of[pages] = -1
        self._push(pages)

    def _push(self, pages: Pointers) -> None:
        slabs = pages // self.slab_pages
        for size, own in self._slabs.items():
            back = pages[np.isin(slabs, own)]
            if len(back):
                self._free[size].push(back)

    def _make_room(self, size: int) -> bool:
        """Free slots of a size; False if nothing may leave."""
        if not self._blank and (coldest := self._coldest(size)) is not None:
            self._empty(*coldest)
        if self._blank:
            slab = self._blank.pop()
            self._slabs.setdefault(size, []).append(slab)
            self._free[size].push(self._slots(slab, size))
            return True
        own = self._linked(self._pages(size))
        leaving = max(min(len(own), 1), len(own) // _BATCHES)
        if leaving < len(own):
            order = np.argpartition(self._records.used[own], leaving)
            own = own[order[:leaving]]
        self.unlink(own)
        self.evictions += len(own)
        return len(own) > 0

    def _coldest(self, size: int) -> tuple[int, int] | None:
        """Size and number of a slab of another size that is colder than all of this size."""
        candidates = []
        for other, slabs in self._slabs.items():
            for slab in slabs if other != size else ():
                pages = self._slots(slab, other)
                places = self._place_of[pages]
                places = places[places >= 0]
                if not self._records.pins[places].any():
                    used = int(self._records.used[places].max(initial=0))
                    candidates.append((used, other, slab))
        if not candidates:
            return None
        used, other, slab = min(candidates)
        own = self._linked(self._pages(size))
        is_colder = not len(own) or used < int(self._records.used[own].min())
        return (other, slab) if is_colder else None

    def _empty(self, size: int, slab: int) -> None:
        pages = self._slots(slab, size)
        held = self._place_of[pages]
        places: Pointers = held[held >= 0].astype(np.int64)
        self.unlink(places)
        self.evictions += len(places)
        first = slab * self.slab_pages
        self._free[size].discard(slice(first, first + self.slab_pages))
        self._slabs[size].remove(slab)
        self._blank.append(slab)

    def _slots(self, slab: int, size: int) -> Pointers:
        each = size // PAGE
        first = slab * self.slab_pages
        return np.arange(first, first + self.slab_pages - each + 1, each, dtype=np.int64)

    def _pages(self, size: int) -> Pointers:
        found = [np.empty(0, np.int64)]
        found.extend(self._slots(slab, size) for slab in self._slabs.get(size, ()))
        return np.concatenate(found)

    def _linked(self, pages: Pointers) -> Pointers:
        """Places at those pages that nobody has pinned."""
        places = self._place_of[pages]
        linked: Pointers = places[places >= 0].astype(np.int64)
        unpinned: Pointers = linked[self._records.pins[linked] == 0]
        return unpinned

    def value(self, page: int, nbytes: int) -> Bytes:
        """The value at a page; it stays while its record is pinned."""
        return self.bytes[page * PAGE : page * PAGE + nbytes]

    def copy_out(self, visited: Visited, nbytes: int, out: Bytes, lengths: Pointers) -> None:
        """Copy those of the values that are here to their rows of `out`, `nbytes` altogether.

        `lengths` receives their sizes, -1 for the others. No value may be longer than a row.
        """
        pages, sizes = visited.pages, visited.sizes

        def copy(first: int, last: int) -> None:
            part = slice(first, last)
            kernels.copy_out(self.bytes, PAGE, pages[part], sizes[part], out[part], lengths[part])

        over_rows(len(pages), nbytes, copy)

    def has_pinned(self) -> bool:
        """Whether somebody reads a value in place."""
        places = self._place_of[self._place_of >= 0]
        return bool(self._records.pins[places].any())

    def clear(self) -> None:
        """Forget every copy; none may be pinned."""
        self.unlink(self._place_of[self._place_of >= 0].astype(np.int64))

    def validate(self) -> None:
        """Assert the invariants; for tests."""
        linked = np.flatnonzero(self._place_of >= 0)
        assert np.array_equal(self._records.cached[self._place_of[linked]], linked)
        assert int((self._records.cached >= 0).sum()) == len(linked)
        for size in self._slabs:
            free = self._free[size].content()
            pages = self._pages(size)
            assert len(np.unique(free)) == len(free)
            assert np.isin(free, pages).all()
            held = int((self._place_of[pages] >= 0).sum())
            assert len(free) + held == len(pages), "a slot is neither free nor held"


def _slabs(limit_bytes: int) -> tuple[int, int]:
    """Pages of a slab, and how many slabs a limit has room for. ConfigError if for none."""
    pages = limit_bytes // (PAGE + _TABLE_BYTES_PER_PAGE)
    share = max(pages // _SLABS, 1)
    slab_pages = max(1 << (share.bit_length() - 1), _SMALLEST_SLAB // PAGE)
    if pages < slab_pages:
        raise ConfigError(
            f"dram={format_size(limit_bytes)}: expected at least "
            f"{format_size(_SMALLEST_SLAB + 2 * PAGE)}, or None for no memory tier"
        )
    return slab_pages, pages // slab_pages
