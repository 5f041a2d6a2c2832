"""Faults behind any call of the I/O seam, and power losses.

A sweep that fails each call of an operation in turn::

    quiet = FaultIO(folder)
    operation(quiet)
    for number in range(1, quiet.calls + 1):
        io = FaultIO(another_folder)
        io.inject("*", error(errno.EIO), nth=number)
        operation(io)
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.io import FileIO
from tierstore.testing.powerloss import Disk, File, Folder, Resize, Write, copy_file

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer, WriteableBuffer

    from tierstore.testing.powerloss import Keep

TRANSFERS = ("read", "write")
KINDS = (
    "open", "close", *TRANSFERS, "sync", "sync_directory", "allocate", "truncate", "size",
    "free_bytes", "list", "make_directory", "rename", "remove", "reached",
)  # fmt: skip
"""Methods of `FileIO`; a `read_into` is a "read" too."""


@dataclass
class Call:
    """A call that is about to be made. An effect may change it, wait, or raise an OSError.

    kind: one of `KINDS`. name: of the file, without its directory, or the point that was reached.
    offset, limit: where a transfer begins, and how many bytes it may move (None: all). flips:
    bytes of a transfer to change, as (position, mask).
    """

    kind: str
    name: str
    offset: int = 0
    limit: int | None = None
    flips: list[tuple[int, int]] = field(default_factory=list)


Effect = Callable[[Call], object]


def error(code: int) -> Effect:
    """The call fails with that errno and does nothing; a `close` closes all the same.

    After a failed `sync`, what it should have made durable never will be by another one.
    """

    def effect(call: Call) -> None:
        raise OSError(code, f"{os.strerror(code)} (injected into {call.kind})", call.name)

    return effect


def short(nbytes: int) -> Effect:
    """A transfer moves at most `nbytes` bytes; 0: it makes no progress."""

    def effect(call: Call) -> None:
        call.limit = nbytes if call.limit is None else min(nbytes, call.limit)

    return effect


def damaged(position: int = 0, mask: int = 0x01) -> Effect:
    """One byte of a transfer is changed by exclusive or with `mask`.

    position: of the byte in the transfer, counted round and round; negative from the end.
    """

    def effect(call: Call) -> None:
        call.flips.append((position, mask))

    return effect


def misdirected(shift: int) -> Effect:
    """A transfer goes to or comes from a place `shift` bytes further on."""

    def effect(call: Call) -> None:
        call.offset += shift

    return effect


def delayed(seconds: float, sleep: Callable[[float], object] = time.sleep) -> Effect:
    """The call begins so much later; `sleep` may be that of a fake clock."""

    def effect(call: Call) -> None:
        sleep(seconds)

    return effect


def hanging(released: threading.Event, arrived: threading.Event | None = None) -> Effect:
    """The call begins when `released` is set; `arrived` is set when it hangs."""

    def effect(call: Call) -> None:
        if arrived is not None:
            arrived.set()
        released.wait()

    return effect


class Fault:
    """An effect on some calls; `hits` counts them."""

    def __init__(
        self,
        kinds: frozenset[str],
        effect: Effect,
        name: str,
        is_due: Callable[[int], bool],
    ) -> None:
        self.hits = 0
        self.effect = effect
        self._kinds = kinds
        self._name = name
        self._is_due = is_due
        self._seen = 0

    def strikes(self, call: Call) -> bool:
        """Count the call if it is of ours; whether the effect is due."""
        if call.kind not in self._kinds or not fnmatchcase(call.name, self._name):
            return False
        self._seen += 1
        is_hit = self._is_due(self._seen)
        self.hits += is_hit
        return is_hit


class FaultIO(FileIO):
    """A seam to real files with scripted faults, and a model of what a power loss would leave.

    Files below `root` are followed by the model; those that do not come through the seam are not.
    The real disk is never made to sync. Threads may call at once.

    Parameters
    ----------
    root: the directory whose power losses matter.
    io: what is really called.
    seed: of faults that strike at random.
    """

    def __init__(self, root: str | Path, io: FileIO | None = None, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        """Calls so far by kind."""
        self.points: Counter[str] = Counter()
        """Points reached so far, by name."""
        self._io = FileIO() if io is None else io
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._gate = threading.Lock()
        self._lock = threading.RLock()
        self._disk = Disk(str(root))
        self._open: dict[int, tuple[str, File | None]] = {}

    # Faults

    @property
    def calls(self) -> int:
        """Calls so far that could have failed: all but those of `reached`."""
        return self.counts.total() - self.counts["reached"]

    def inject(
        self,
        kinds: str,
        effect: Effect,
        *,
        nth: int | None = None,
        since: int | None = None,
        one_in: int | None = None,
        name: str = "*",
    ) -> Fault:
        """Have an effect on calls made from now on; what `inject` returns counts its hits.

        kinds: one of `KINDS`, several with blanks between, or "*" for all but "reached".
        effect: see `error`, `short`, `damaged`, `misdirected`, `delayed`, `hanging`; or any
            function, which sees the call just before it is made.
        nth, since, one_in: only the n-th of them (from 1), from the n-th on, or one in so many at
            random; all of them if none is given.
        name: only for files, or points, whose names match this pattern.
        """
        wanted = frozenset(KINDS) - {"reached"} if kinds == "*" else frozenset(kinds.split())
        if not wanted or not wanted <= frozenset(KINDS):
            raise ConfigError(
                f"inject({kinds!r}): expected names out of {', '.join(KINDS)}, or '*'"
            )
        given = [number for number in (nth, since, one_in) if number is not None]
        if len(given) > 1 or any(number < 1 for number in given):
            raise ConfigError(
                f"inject(nth={nth}, since={since}, one_in={one_in}): expected one of them at most, "
                "from 1 on"
            )
        fault = Fault(wanted, effect, name, self._schedule(nth, since, one_in))
        with self._gate:
            self._faults.append(fault)
        return fault

    def _schedule(
        self, nth: int | None, since: int | None, one_in: int | None
    ) -> Callable[[int], bool]:
        if nth is not None:
            return lambda number: number == nth
        if one_in is not None:
            return lambda number: self._random.randrange(one_in) == 0
        return lambda number: number >= (since or 1)

    def heal(self) -> None:
        """Lift all faults. What hangs goes on hanging until it is released."""
        with self._gate:
            self._faults.clear()

    def _enter(self, kind: str, name: str, offset: int = 0) -> Call:
        """Count a call and let the faults have it; OSError if they want that."""
        call = Call(kind, os.path.basename(name) if kind != "reached" else name, offset)
        with self._gate:
            self.counts[kind] += 1
            struck = [fault for fault in self._faults if fault.strikes(call)]
        for fault in struck:
            fault.effect(call)
        if kind not in TRANSFERS and (
            call.limit is not None or call.flips or call.offset != offset
        ):
            raise ConfigError(f"{kind} moves no bytes: expected an effect that fails or delays it")
        return call

    # Power loss

    def crash(
        self,
        into: Path,
        *,
        keep: Keep,
        tear: int | None = None,
        seed: int = 0,
        copy: Callable[[Path, Path], object] = copy_file,
    ) -> None:
        """Write the files as a power loss now could leave them into a new or empty directory.

        What was synced is there in any case: content by `sync`, names by `sync_directory`. The
        real files stay as they are, and the seam can go on being used.

        Parameters
        ----------
        keep: which of the writes, cuts and names that were not synced survive: "none", "all", or
            a "random" subset of them, each on its own.
        tear: sector size in bytes. Of the last write to each file ("all"), or of each ("random"),
            any sectors may have reached the disk without the others.
        seed: of what is random.
        copy: copies a file, from and to these paths, that did not come through the seam.
        """
        with self._lock:
            self._disk.crash(into, keep, tear, seed, copy)

    # The seam

    def open(self, path: str, flags: int) -> int:
        self._enter("open", path)
        with self._lock:
            is_new = not os.path.lexists(path)
            file = None if is_new else self._disk.file(path)
            is_cut = bool(flags & os.O_TRUNC) and file is not None and not flags & os.O_EXCL
            if file is not None and is_cut:
                file.before_resize(0)
            fd = self._io.open(path, flags)
            if is_new:
                file = self._disk.file(path, is_new=True)
                if file is not None:
                    self._disk.note_new(path, file)
            elif file is not None and is_cut:
                file.note(Resize(0, only_up=False))
            self._open[fd] = (path, file)
            return fd

    def _of(self, fd: int) -> tuple[str, File | None]:
        return self._open.get(fd, ("", None))

    def close(self, fd: int) -> None:
        with self._lock:
            path, _ = self._open.pop(fd, ("", None))
        try:
            self._enter("close", path)
        finally:
            self._io.close(fd)

    def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
        return self.read_into(fd, [buffer], offset)

    @property
    def reads_many(self) -> bool:
        return False

    def read_many(
        self, reads: Sequence[tuple[int, int, Sequence[WriteableBuffer]]]
    ) -> Generator[tuple[int, int], None, None]:
        yield from ()  # so that each is asked for by `read`

    def read_into(self, fd: int, buffers: Sequence[WriteableBuffer], offset: int) -> int:
        call = self._enter("read", self._of(fd)[0], offset)
        pieces = _clipped([memoryview(buffer).cast("B") for buffer in buffers], call.limit)
        if call.limit == 0:
            return 0
        count = self._io.read_into(fd, pieces, call.offset)
        for position, mask in call.flips if count else []:
            at = position % count
            for piece in pieces:
                if at < len(piece):
                    piece[at] ^= mask
                    break
                at -= len(piece)
        return count

    def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
        path, file = self._of(fd)
        call = self._enter("write", path, offset)
        pieces = _clipped([memoryview(buffer).cast("B") for buffer in buffers], call.limit)
        if call.limit == 0:
            return 0
        data = b"".join(pieces)
        if call.flips and data:
            pieces = [_flipped(data, call.flips)]
            data = bytes(pieces[0])
        with self._lock:
            if file is None:
                return self._io.write(fd, pieces, call.offset)
            file.before_write(call.offset, len(data))
            count = self._io.write(fd, pieces, call.offset)
            file.note(Write(call.offset, data[:count]))
            return count

    def sync(self, fd: int) -> None:
        path, file = self._of(fd)
        covered = 0 if file is None else file.changes
        try:
            self._enter("sync", path)
        except OSError:
            with self._lock:
                if file is not None:
                    file.fail_sync(covered)
            raise
        with self._lock:
            self._io.size(fd)  # a descriptor that is not open is an error here too
            if file is not None:
                file.sync(covered)

    def sync_directory(self, path: str) -> None:
        with self._lock:
            covered = self._disk.changes_in(path)
        self._enter("sync_directory", path)
        with self._lock:
            self._io.list(path)
            self._disk.sync_names(covered)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        path, file = self._of(fd)
        self._enter("allocate", path)
        with self._lock:
            self._io.allocate(fd, offset, length)
            if file is not None:
                file.note(Resize(offset + length, only_up=True))

    def truncate(self, fd: int, size: int) -> None:
        path, file = self._of(fd)
        self._enter("truncate", path)
        with self._lock:
            if file is not None:
                file.before_resize(size)
            self._io.truncate(fd, size)
            if file is not None:
                file.note(Resize(size, only_up=False))

    def size(self, fd: int) -> int:
        self._enter("size", self._of(fd)[0])
        return self._io.size(fd)

    def free_bytes(self, path: str) -> int:
        self._enter("free_bytes", path)
        return self._io.free_bytes(path)

    def list(self, path: str) -> list[str]:
        self._enter("list", path)
        return self._io.list(path)

    def make_directory(self, path: str) -> None:
        self._enter("make_directory", path)
        with self._lock:
            self._io.make_directory(path)
            self._disk.note_new(path, Folder())

    def rename(self, source: str, target: str) -> None:
        self._enter("rename", source)
        with self._lock:
            if os.path.isdir(source):
                raise ConfigError(
                    f"rename({source!r}): FaultIO follows names of files only; make a new directory"
                )
            file, replaced = self._disk.file(source), self._disk.file(target)
            self._io.rename(source, target)
            if file is not None:
                self._disk.note_rename(source, target, file, replaced)

    def remove(self, path: str) -> None:
        self._enter("remove", path)
        with self._lock:
            file = self._disk.file(path)
            self._io.remove(path)
            if file is not None:
                self._disk.note_remove(path, file)

    def reached(self, point: str) -> None:
        with self._gate:
            self.points[point] += 1
        self._enter("reached", point)
        self._io.reached(point)


def _clipped(pieces: list[memoryview], limit: int | None) -> list[memoryview]:
    """The first `limit` bytes of the pieces."""
    if limit is None:
        return pieces
    clipped = []
    for piece in pieces:
        clipped.append(piece[:limit])
        limit = max(0, limit - len(piece))
    return clipped


def _flipped(data: bytes, flips: list[tuple[int, int]]) -> memoryview:
    """A changed copy, aligned as direct writes want it."""
    copy = memoryview(mmap.mmap(-1, len(data)))
    copy[:] = data
    for position, mask in flips:
        copy[position % len(data)] ^= mask
    return copy
