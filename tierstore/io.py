"""The one seam between durable storage and the operating system.

What reads, writes, syncs and names durable files goes through a `FileIO`, so that a test can put
faults, short transfers and power losses behind any single call (`tierstore.testing.FaultIO`).
"""

from __future__ import annotations

import errno
import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from tierstore.errors import TierOfflineError
from tierstore.ring import Ring, open_ring

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag that passes the page cache by; 0 where the system has none."""

_MOST_BUFFERS = 1024
"""Buffers that one call of the operating system takes."""

_MOST_WRITTEN = 1 << 18
"""Bytes of one call. A buffered write of some MiB gets its page cache in pages so large that each
byte costs up to five times as much (ext4, Linux 6.18, measured 2026-11-29)."""

_MOST_RINGS = 4

SAFE = os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags of every open: not inherited by other programs, and no links followed."""


class FileIO:
    """Thin calls of the operating system. Every method may raise OSError.

    Threads may call at once. `read` and `write` may move fewer bytes than asked for; use
    `read_fully` and `write_fully`.
    """

    def open(self, path: str, flags: int) -> int:
        """A descriptor; a new file gets mode 0600. `SAFE` is added to `flags`."""
        return os.open(path, flags | SAFE, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
        """Bytes read at `offset` into `buffer`; 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def read_into(self, fd: int, buffers: Sequence[WriteableBuffer], offset: int) -> int:
        """Bytes read at `offset` into `buffers`, one after the other; at most 1,024 buffers."""
        return os.preadv(fd, buffers, offset)

    @property
    def reads_many(self) -> bool:
        """Whether `read_many` does what it says: reads are the system's, and it has a ring."""
        own = type(self).read, type(self).read_into
        return own == (FileIO.read, FileIO.read_into) and _rings.are_there()

    def read_many(
        self, reads: Sequence[tuple[int, int, Sequence[WriteableBuffer]]]
    ) -> Generator[tuple[int, int], None, None]:
        """`read_into` of (fd, offset, buffers), many at once: each position, with its bytes read.

        In the order in which they are done. What comes short, or not at all, is to be asked for by
        `read`, which says why; so is everything unless `reads_many`.
        """
        if not self.reads_many or (ring := _rings.take()) is None:
            return
        is_well = False
        try:
            yield from ring.read(reads)
            is_well = True
        except GeneratorExit:
            is_well = True
            raise
        except OSError:
            return
        finally:
            if is_well:
                _rings.give(ring)
            else:
                ring.close()

    def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
        """Bytes of `buffers`, one after the other, written at `offset`."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Return when what was written to the file survives a power loss."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory survive a power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | SAFE)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve disk blocks for a range, which reads as zeros where nothing was written."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        """Bytes in the file."""
        return os.fstat(fd).st_size

    def free_bytes(self, path: str) -> int:
        """Bytes that the file system of `path` still has for us."""
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize

    def list(self, path: str) -> list[str]:
        """Names in a directory."""
        return os.listdir(path)

    def make_directory(self, path: str) -> None:
        """A new directory with mode 0700."""
        os.mkdir(path, 0o700)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of the file that has it."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def reached(self, point: str) -> None:
        """A named moment of an operation, where a test may end the process."""


class _Rings:
    """Rings that nobody uses at the moment. A fork begins with none."""

    def __init__(self) -> None:
        self._idle: list[Ring] = []
        self._process = os.getpid()
        self._are_there: bool | None = None

    def are_there(self) -> bool:
        """Whether this system gives rings."""
        if self._are_there is None:
            ring = open_ring()
            self._are_there = ring is not None
            if ring is not None:
                self.give(ring)
        return self._are_there

    def take(self) -> Ring | None:
        """A ring, which no other thread has; None where there is none to be had."""
        if os.getpid() != self._process:
            for ring in self._idle:
                ring.close()
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return open_ring()

    def give(self, ring: Ring) -> None:
        """Return a ring."""
        if len(self._idle) < _MOST_RINGS:
            self._idle.append(ring)
        else:
            ring.close()


_rings = _Rings()


def read_fully(io: FileIO, fd: int, buffer: WriteableBuffer, offset: int) -> None:
    """Fill `buffer` from `offset` on. TierOfflineError if the file ends before that."""
    rest = memoryview(buffer).cast("B")
    while len(rest):
        try:
            count = io.read(fd, rest, offset)
        except (InterruptedError, BlockingIOError):
            continue
        if count <= 0:
            raise TierOfflineError(
                errno.EIO, f"the file ends at {offset}: {len(rest)} more bytes were expected"
            )
        rest, offset = rest[count:], offset + count


def write_fully(io: FileIO, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> None:
    """Write all of `buffers`, one after the other, from `offset` on."""
    rest = deque(memoryview(buffer).cast("B") for buffer in buffers)
    while rest:
        pieces = _first(rest)
        if not pieces:
            return
        try:
            count = io.write(fd, pieces, offset)
        except (InterruptedError, BlockingIOError):
            continue
        if count <= 0:
            raise OSError(errno.EIO, f"nothing could be written at {offset}")
        offset += count
        _drop(rest, count)


def _first(rest: deque[memoryview]) -> list[memoryview]:
    """Pieces for one call from the start of the rest; empty ones at the start are dropped."""
    while rest and not len(rest[0]):
        rest.popleft()
    pieces: list[memoryview] = []
    room = _MOST_WRITTEN
    for piece in islice(rest, _MOST_BUFFERS):
        pieces.append(piece[:room])
        room -= len(piece)
        if room <= 0:
            break
    return pieces


def _drop(rest: deque[memoryview], count: int) -> None:
    while count:
        piece = rest.popleft()
        if len(piece) > count:
            rest.appendleft(piece[count:])
            return
        count -= len(piece)
