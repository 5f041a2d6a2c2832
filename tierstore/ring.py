"""Many reads of files under way at once, from one thread, by io_uring.

Threads that read through Python take the global lock back after every read, which costs more than
the reads where the disk is fast. This needs Linux 5.6 on x86-64; elsewhere, and where a sandbox
forbids it, `open_ring` answers None.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from _typeshed import WriteableBuffer

_SETUP, _ENTER = 425, 426
_GET_EVENTS = 1
_READ_VECTOR = 1
_SUBMISSIONS_AT = 0x10000000
_NEEDED = 1 | 8
"""One map for both queues, and Linux 5.6."""
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.EBUSY)

_SUBMISSION = np.dtype(
    {
        "names": ["opcode", "fd", "offset", "address", "size", "user"],
        "formats": ["u1", "<i4", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_PIECE = np.dtype([("address", "<u8"), ("size", "<u8")])
_COMPLETION = np.dtype([("user", "<u8"), ("result", "<i4"), ("flags", "<u4")])

DEPTH = 64
"""Reads under way at once."""
_TOGETHER = 16
"""Completions that are waited for: fewer calls of the system, and still others under way."""


class Ring:
    """One submission and one completion queue. One thread at a time."""

    def __init__(self, fd: int, parameters: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        entries, completions = int(parameters[0]), int(parameters[1])
        submission, completion = parameters[10:20], parameters[20:30]
        size = max(
            int(submission[6]) + 4 * entries,
            int(completion[5]) + _COMPLETION.itemsize * completions,
        )
        self._fd = fd
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        self._requests = np.frombuffer(
            mmap.mmap(fd, 64 * entries, flags=mmap.MAP_SHARED, offset=_SUBMISSIONS_AT), _SUBMISSION
        )
        self._taken = self._words(int(submission[0]))
        self._given = self._words(int(submission[1]))
        self._words(int(submission[6]), entries)[:] = np.arange(entries)
        self._seen = self._words(int(completion[0]))
        self._done = self._words(int(completion[1]))
        self._results = np.frombuffer(self._map, _COMPLETION, completions, int(completion[5]))

    def _words(self, at: int, count: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.frombuffer(self._map, np.uint32, count, at)

    def read(
        self, reads: Sequence[tuple[int, int, Sequence[WriteableBuffer]]]
    ) -> Generator[tuple[int, int], None, None]:
        """Fill buffers: the position of each (fd, offset, buffers) as it is done, and its bytes.

        A read fills its buffers one after the other, at most 1,024. A negative number of bytes is
        an error of the system. Closed early, it waits for what is under way: no buffer changes
        afterwards. OSError if the ring fails: close it then.
        """
        views = [
            np.frombuffer(memoryview(buffer), np.uint8)
            for *_, buffers in reads
            for buffer in buffers
        ]
        pieces = np.empty(len(views), _PIECE)
        pieces["address"] = [view.__array_interface__["data"][0] for view in views]
        pieces["size"] = [view.nbytes for view in views]
        counts = np.array([len(buffers) for *_, buffers in reads], np.uint64)
        requests = np.zeros(len(reads), _SUBMISSION)
        requests["opcode"] = _READ_VECTOR
        requests["fd"] = [fd for fd, _, _ in reads]
        requests["offset"] = [offset for _, offset, _ in reads]
        requests["address"] = pieces.ctypes.data + (counts.cumsum() - counts) * _PIECE.itemsize
        requests["size"] = counts
        requests["user"] = np.arange(len(reads))
        begun = done = 0
        try:
            while done < len(reads):
                count = min(len(reads) - begun, DEPTH - (begun - done))
                self._submit(requests[begun : begun + count])
                begun += count
                self._enter(min(_TOGETHER, begun - done))
                found = self._collect()
                done += len(found)
                yield from found
        finally:
            self._drain()
            del views, pieces

    @property
    def _under_way(self) -> int:
        """Reads that were submitted and not collected, by the queues' own counters."""
        return (int(self._given[0]) - int(self._seen[0])) & 0xFFFFFFFF

    def _drain(self) -> None:
        """Wait for what is under way, and forget it. OSError: it still is."""
        while self._under_way:
            self._enter(self._under_way)
            self._collect()

    def _submit(self, requests: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        tail = int(self._given[0])
        places = (tail + np.arange(len(requests))) % len(self._requests)
        self._requests[places] = requests
        self._given[0] = (tail + len(requests)) & 0xFFFFFFFF

    def _enter(self, wanted: int) -> None:
        """Hand over what was submitted and wait for so many completions."""
        while True:
            waiting = (int(self._given[0]) - int(self._taken[0])) & 0xFFFFFFFF
            if _syscall(_ENTER, self._fd, waiting, wanted, _GET_EVENTS, 0, 0) >= 0:
                return
            code = ctypes.get_errno()
            if code not in _AGAIN:
                raise OSError(code, f"io_uring failed: {os.strerror(code)}")

    def _collect(self) -> list[tuple[int, int]]:
        head = int(self._seen[0])
        count = (int(self._done[0]) - head) & 0xFFFFFFFF
        found = self._results[(head + np.arange(count)) % len(self._results)]
        self._seen[0] = (head + count) & 0xFFFFFFFF
        return list(zip(found["user"].tolist(), found["result"].tolist(), strict=True))

    def close(self) -> None:
        """Give up the descriptor. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_ring() -> Ring | None:
    """A new ring, or None where there is none to be had."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    parameters = np.zeros(30, np.uint32)
    fd = _syscall(_SETUP, DEPTH, parameters.ctypes.data, 0, 0, 0, 0)
    if fd < 0:
        return None
    if int(parameters[5]) & _NEEDED == _NEEDED:
        try:
            return Ring(fd, parameters)
        except OSError:
            pass
    os.close(fd)
    return None


def _syscall(number: int, *arguments: int) -> int:
    return int(_libc().syscall(number, *map(ctypes.c_long, arguments)))


_library: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    if not _library:
        library = ctypes.CDLL(None, use_errno=True)
        library.syscall.restype = ctypes.c_long
        _library.append(library)
    return _library[0]
