"""One segment file while it is open."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tierstore.aligned import aligned_rows
from tierstore.errors import CapacityError
from tierstore.io import DIRECT, read_fully, write_fully
from tierstore.sizes import format_size
from tierstore.volume.format import GROUP, PAGE, ROW, ROW_BYTES, Header, place_binding, whole_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.io import FileIO
    from tierstore.volume.records import Records

SUFFIX = ".seg"
_ZEROS = bytes(PAGE)


class Segment:
    """A file of extents of one size, or a blank one; `first` is the place of its first extent.

    is_dirty: something was written since the last successful `sync`. dirty_groups: groups of rows
    that the directory does not know as they are. is_draining: cleared, but somebody still reads.
    is_stale: blank, while its header on disk still shows records that were dropped.
    """

    def __init__(self, io: FileIO, directory: str, number: int, nbytes: int) -> None:
        self.number = number
        self.dirty_groups: set[int] = set()
        self.nbytes = nbytes
        self.path = os.path.join(directory, f"{number:08d}{SUFFIX}")
        self.forget()
        self.first = 0
        self.is_dirty = False
        self.is_stale = False
        self._io = io
        self._fd = -1
        self.direct = -1
        """Descriptor for reads that pass the page cache by, or the ordinary one."""

    @property
    def is_blank(self) -> bool:
        """Whether the file has no extents yet."""
        return self.header.extents == 0

    @property
    def places(self) -> slice:
        """The places of its extents."""
        return slice(self.first, self.first + self.header.extents)

    def create(self) -> None:
        """Make the file, with all its bytes reserved. CapacityError if the disk is full."""
        self._fd = self._io.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            reserve(self._io, self._fd, self.path, self.nbytes)
            self._open_direct()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove a file that is of no use, as far as that is possible."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self._io.remove(self.path)

    def open(self, *, read_only: bool = False) -> int:
        """Open the file that is there; returns its size in bytes."""
        self._fd = self._io.open(self.path, os.O_RDONLY if read_only else os.O_RDWR)
        self._open_direct()
        return self._io.size(self._fd)

    def _open_direct(self) -> None:
        """Open for direct reads, if a real one works; overlay and memory file systems refuse."""
        self.direct = self._fd
        if not DIRECT:
            return
        direct = -1
        try:
            direct = self._io.open(self.path, os.O_RDONLY | DIRECT)
            read_fully(self._io, direct, aligned_rows(1, PAGE).data, 0)
        except OSError:
            if direct >= 0:
                self._io.close(direct)
            return
        self.direct = direct

    @property
    def is_direct(self) -> bool:
        """Whether reads pass the page cache by."""
        return self.direct != self._fd

    def is_in_place(self) -> bool:
        """Whether its name still stands for the open file. FileNotFoundError if it is gone."""
        return os.path.samestat(os.lstat(self.path), os.fstat(self._fd))

    def size(self) -> int:
        """Bytes in the file."""
        return self._io.size(self._fd)

    def extend(self) -> None:
        """Reserve the bytes that a file which is too short lacks."""
        reserve(self._io, self._fd, self.path, self.nbytes)

    def cut(self) -> None:
        """Remove what follows the bytes that belong to the file."""
        self._io.truncate(self._fd, self.nbytes)

    def wipe(self, header: Header) -> None:
        """Let the disk forget what is in the file, but for that header. OSError if it is full."""
        self._io.truncate(self._fd, 0)
        self._io.allocate(self._fd, 0, self.nbytes)
        self.write_header(header)

    # Header and rows

    def read_header(self) -> Header | None:
        """What the first page says; None if it is no header. StoreMismatchError: newer format."""
        return Header.decode(self._first_page(), self.nbytes)

    def is_new(self) -> bool:
        """Whether the first page was never written."""
        return not any(self._first_page())

    def _first_page(self) -> bytes:
        """What the file begins with; zeros where it is shorter than a page."""
        page = bytearray(min(self.size(), PAGE))
        read_fully(self._io, self._fd, page, 0)
        return bytes(page).ljust(PAGE, b"\0")

    def begin(self, header: Header) -> None:
        """Make the file one of so many empty extents."""
        write_fully(self._io, self._fd, [_ZEROS] * (header.data_offset // PAGE - 1), PAGE)
        self.write_header(header)
        # The directory is to know the generation: an older header is then a lost write.
        self.dirty_groups.update(range(-(-header.extents // GROUP)))

    def write_header(self, header: Header) -> None:
        """Be a file with that header, on disk too; its rows stay as they are."""
        write_fully(self._io, self._fd, [header.encode()], 0)
        self.take(header)
        self.is_dirty, self.is_stale = True, False

    def take(self, header: Header) -> None:
        """Be a file with that header."""
        self.header = header
        self._binding = place_binding(header)

    def forget(self) -> None:
        """Be blank in memory; the file keeps its old header until the next `begin`."""
        self.take(Header(b"\0" * 16, 0, self.number, 0, 0, 0))
        self.dirty_groups.clear()
        self.is_draining = False

    def read_rows(self, records: Records) -> None:
        """Fill this file's rows in `records` with what its table says."""
        rows = records.rows[self.places].view(np.uint8)
        read_fully(self._io, self._fd, rows.data, PAGE)

    def write_rows(self, places: npt.NDArray[np.int64], records: Records) -> None:
        """Write rows from `records`; neighbours in one call."""
        extents = np.sort(places) - self.first
        breaks = np.flatnonzero(np.diff(extents) != 1) + 1
        for run in np.split(extents, breaks):
            rows = records.rows[self.first + run[0] : self.first + run[-1] + 1]
            offset = PAGE + int(run[0]) * ROW_BYTES
            self.is_dirty = True
            self.dirty_groups.update(range(int(run[0]) // GROUP, int(run[-1]) // GROUP + 1))
            write_fully(self._io, self._fd, [rows.view(np.uint8).data], offset)

    def digest(self, group: int, records: Records) -> bytes:
        """xxh3-128 of the rows of a group, as they are in memory."""
        first = self.first + group * GROUP
        rows = records.rows[first : min(first + GROUP, self.places.stop)]
        return xxhash.xxh3_128_digest(rows.view(np.uint8).data)

    def rows_on_disk(self, first: int, count: int) -> npt.NDArray[np.void]:
        """Rows of extents as the file has them now; `first` is a multiple of `GROUP`."""
        size = count * ROW_BYTES
        buffer = aligned_rows(1, whole_pages(size))[0].data
        read_fully(self._io, self.direct, buffer, PAGE + first * ROW_BYTES)
        return np.frombuffer(buffer[:size], ROW)

    # Extents

    def binding(self, place: int) -> bytes:
        """What ties a row and its payload to their place."""
        return self._binding + (place - self.first).to_bytes(8, "little")

    def offset(self, place: int) -> int:
        """Where the extent of a place begins."""
        return self.header.data_offset + (place - self.first) * self.header.extent_bytes

    def write_extents(self, place: int, pieces: Sequence[memoryview | bytes]) -> None:
        """Write `pieces`, one after the other, from the extent of `place` on."""
        self.is_dirty = True
        write_fully(self._io, self._fd, pieces, self.offset(place))

    def sync(self) -> None:
        """Return when everything written survives a power loss. OSError: unknown what does."""
        self._io.sync(self._fd)

    def close(self) -> None:
        """Give up the descriptors. A second call does nothing."""
        fds, self._fd, self.direct = {self._fd, self.direct}, -1, -1
        with ExitStack() as closing:
            for fd in fds - {-1}:
                closing.callback(self._io.close, fd)


def reserve(io: FileIO, fd: int, path: str, nbytes: int) -> None:
    """Reserve the first bytes of a file. CapacityError if the disk is full."""
    try:
        io.allocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = io.free_bytes(os.path.dirname(path))
        raise CapacityError(
            f"{path!r}: {format_size(nbytes)} are needed, {format_size(free)} are free: free disk "
            "space, or give the store less"
        ) from error


def stored_digest(pieces: Sequence[memoryview | bytes]) -> bytes:
    """xxh3-128 of a payload's pieces, one after the other."""
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0])
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()
