"""A tier in one file that KvikIO reads and writes, by GPUDirect Storage where there is that."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierstore.aligned import aligned_rows
from tierstore.errors import ConfigError, MissingExtraError, TierOfflineError
from tierstore.interfaces import Bytes, Completion, Ids, Tier
from tierstore.kernels.element import is_host
from tierstore.sizes import parse_size
from tierstore.tiers.memory import copy
from tierstore.tiers.scratch import ScratchFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path
    from types import ModuleType

    from tierstore.layout import BlockLayout

    Range = tuple[int, int]
    """First byte and end, inside a slot."""

_PAGE = max(4096, mmap.PAGESIZE)
_STAGING_BYTES = 256 << 10
_KNOWN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ENOMEM)
_HOST = -1


class GdsTier(Tier):
    """Blocks in a scratch file, moved past the page cache straight to and from host or GPU memory.

    `medium` says how: by GPUDirect Storage, or by KvikIO's POSIX mode where that is not to be had.
    A slot begins at a page, so that direct transfers are possible: blocks that are no multiple of
    4 KiB leave the rest of their last page unused. The file is made as that of an `MmapTier`.

    KvikIO needs the CUDA driver's library also where it does without a GPU. Its settings belong to
    the process: `threads`, `task_bytes` and direct reads are in force for all that uses KvikIO.

    ConfigError if the file exists or cannot be made, or KvikIO does not work on this machine;
    MissingExtraError without the extra ``cuda``.

    Parameters
    ----------
    threads: of KvikIO, each with one request at a time.
    task_bytes: longer requests are divided.
    depth: staging buffers of 256 KiB or one block, for what cannot move in place.
    """

    def __init__(
        self,
        layout: BlockLayout,
        path: str | Path,
        limit: int | str | None = None,
        *,
        threads: int = 16,
        task_bytes: int | str = "4MiB",
        depth: int = 32,
        name: str = "disk",
    ) -> None:
        if threads < 1 or depth < 1:
            raise ConfigError(f"{name}: threads={threads!r}, depth={depth!r}: expected at least 1")
        task_size = parse_size(task_bytes, "task_bytes")
        self.name = name
        self.layout = layout
        self._stride = -(-layout.block_bytes // _PAGE) * _PAGE
        self._slots = 0
        self._pool = _Pool(depth, max(1, _STAGING_BYTES // self._stride), self._stride)
        self._kvikio = _kvikio(name)
        self._kvikio.defaults.set(
            {"num_threads": threads, "task_size": task_size, "auto_direct_io_read": True}
        )
        self._file = ScratchFile(path, limit, name)
        self.path = self._file.path
        try:
            # By descriptor, since whatever has this name by now need not be the file just made.
            self._handle = self._kvikio.CuFile(f"/proc/self/fd/{self._file.fd}", "r+")
            self._probe()
        except BaseException:
            self.path.unlink(missing_ok=True)
            self._file.close()
            raise
        self._medium = _medium(self._kvikio, self._handle)

    def _probe(self) -> None:
        self._file.reserve(_PAGE, 1)
        sent, found = aligned_rows(1, _PAGE), aligned_rows(1, _PAGE)
        sent[:] = 0xA5
        try:
            moved = (
                self._handle.pwrite(sent, _PAGE, 0).get(),
                self._handle.pread(found, _PAGE).get(),
            )
        except RuntimeError as error:
            raise ConfigError(
                f"{self.name}: KvikIO does not work here ({error}): correct that, or use MmapTier"
            ) from error
        if moved != (_PAGE, _PAGE) or not np.array_equal(sent, found):
            raise ConfigError(
                f"{self.name}: KvikIO read {str(self.path)!r} otherwise than it was written: use "
                "another file system, or MmapTier"
            )
        self._file.cut(0)

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def limit(self) -> int:
        return self._file.limit_bytes // self._stride

    @property
    def used_bytes(self) -> int:
        return self._file.size

    @property
    def medium(self) -> str:
        return self._medium

    def resize(self, slots: int) -> None:
        size = slots * self._stride
        self._file.reserve(size, slots)
        self._slots = slots
        self._file.cut(size)

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self.layout.spans(parts)
        slots, rows = _in_order(slots, rows)
        _settle(out)

        def spread(buffer: Bytes, there: Ids) -> None:
            for start, stop in spans:
                copy(buffer, _numbers(len(there)), out, there, start, stop)
            _settle(out)

        transfer = _Transfer(self._as_os_error)
        with transfer.issuing():
            if self._is_in_place(out, parts):
                self._move_in_place(self._handle.pread, transfer.begin(), slots, out, rows)
                return transfer
            for some in self._shares(slots):
                buffer = self._take(transfer, out)
                stage = transfer.begin(
                    partial(spread, buffer, rows[some]), partial(self._pool.give, buffer)
                )
                self._move(self._handle.pread, stage, slots[some], buffer, _pages(spans))
        return transfer

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self.layout.spans(parts)
        slots, rows = _in_order(slots, rows)
        _settle(blocks)
        transfer = _Transfer(self._as_os_error)
        with transfer.issuing():
            if self._is_in_place(blocks, parts):
                self._move_in_place(self._handle.pwrite, transfer.begin(), slots, blocks, rows)
                return transfer
            for some in self._shares(slots):
                buffer = self._take(transfer, blocks)
                stage = transfer.begin(release=partial(self._pool.give, buffer))
                self._fill_pages(stage, slots[some], buffer, spans)
                for start, stop in spans:
                    copy(blocks, rows[some], buffer, _numbers(len(slots[some])), start, stop)
                _settle(buffer)
                self._move(self._handle.pwrite, stage, slots[some], buffer, _pages(spans))
        return transfer

    def _is_in_place(self, blocks: Bytes, parts: Collection[str] | None) -> bool:
        is_whole = parts is None and self._stride == self.layout.block_bytes
        return is_whole and bool(blocks.flags.c_contiguous)

    def _move_in_place(
        self, move: Callable[..., Any], stage: _Stage, slots: Ids, blocks: Bytes, rows: Ids
    ) -> None:
        """Begin to move blocks between the file and where the caller has them."""
        for first, last in _runs(slots, rows):
            piece = blocks[rows[first] : int(rows[first]) + last - first]
            stage.begin(move, piece, int(slots[first]) * self._stride)

    def _move(
        self,
        move: Callable[..., Any],
        stage: _Stage,
        slots: Ids,
        buffer: Bytes,
        pages: list[Range],
    ) -> None:
        """Begin to move those pages of slots between the file and successive rows of `buffer`."""
        if pages == [(0, self._stride)]:
            for first, last in _runs(slots, _numbers(len(slots))):
                stage.begin(move, buffer[first:last], int(slots[first]) * self._stride)
            return
        for i, slot in enumerate(slots.tolist()):
            for start, stop in pages:
                stage.begin(move, buffer[i, start:stop], slot * self._stride + start)

    def _fill_pages(self, stage: _Stage, slots: Ids, buffer: Bytes, spans: list[Range]) -> None:
        """Read what a write of whole pages needs beside the bytes that it is given."""
        pages = _pages(spans)
        needed = sum(min(stop, self.layout.block_bytes) - start for start, stop in pages)
        if needed > sum(stop - start for start, stop in spans):
            self._move(self._handle.pread, stage, slots, buffer, pages)
            stage.arrive()

    def _shares(self, slots: Ids) -> Iterator[slice]:
        most = self._pool.rows
        return (slice(first, first + most) for first in range(0, len(slots), most))

    def _take(self, transfer: _Transfer, like: Bytes) -> Bytes:
        """A staging buffer where `like` is; the transfer ends some of its own work to get one."""
        buffer = self._pool.take(like)
        while buffer is None and transfer.finish_oldest():
            buffer = self._pool.take(like)
        return self._pool.make(like) if buffer is None else buffer

    def _as_os_error(self, error: RuntimeError) -> OSError:
        """KvikIO's errors are texts: find the operating system's error in it."""
        text = str(error)
        path = str(self.path)
        if text.endswith("EOF"):
            return TierOfflineError(
                errno.EIO, f"{self.name}: {path!r} is shorter than expected: something else cut it"
            )
        code = next((known for known in _KNOWN if os.strerror(known) in text), errno.EIO)
        return OSError(code, f"{self.name}: {path!r} cannot be read or written: {text}")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        if self._file.fd >= 0:
            self._handle.close()
            self._file.close()
            self._slots = 0
            self._pool.clear()


class _Request(NamedTuple):
    future: Any
    nbytes: int


@dataclass(slots=True)
class _Stage:
    """Requests that use one buffer: what to do when they have arrived, and in any case."""

    spread: Callable[[], None] | None = None
    release: Callable[[], None] | None = None
    requests: list[_Request] = field(default_factory=list)

    def begin(self, move: Callable[..., Any], piece: Bytes, offset: int) -> None:
        """Begin to move a contiguous piece of memory from or to an offset of the file."""
        flat = piece.reshape(-1)
        self.requests.append(_Request(move(flat, flat.nbytes, offset), flat.nbytes))

    def arrive(self) -> None:
        """Wait for every request, also after the first that failed, whose error is raised."""
        failure: RuntimeError | None = None
        for future, nbytes in self.requests:
            try:
                moved = future.get()
            except RuntimeError as error:
                failure = failure or error
            else:
                if moved != nbytes:
                    failure = failure or RuntimeError(f"{moved} of {nbytes} bytes moved")
        self.requests.clear()
        if failure is not None:
            raise failure


class _Transfer:
    """Stages under way, the oldest first. When it has raised, nothing is under way any more."""

    def __init__(self, as_os_error: Callable[[RuntimeError], OSError]) -> None:
        self._under_way: deque[_Stage] = deque()
        self._failure: OSError | None = None
        self._as_os_error = as_os_error

    def begin(
        self,
        spread: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> _Stage:
        """A new stage, under way from now on."""
        stage = _Stage(spread, release)
        self._under_way.append(stage)
        return stage

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """Around what begins requests: if that fails, those begun before it are over."""
        try:
            yield
        except BaseException as error:
            while self.finish_oldest():
                pass
            if isinstance(error, RuntimeError):
                raise self._as_os_error(error) from error
            raise

    def finish_oldest(self) -> bool:
        """Wait for the oldest stage; False if there is none. `wait` raises what went wrong."""
        if not self._under_way:
            return False
        stage = self._under_way.popleft()
        try:
            stage.arrive()
            if stage.spread is not None and self._failure is None:
                stage.spread()
        except RuntimeError as error:
            self._failure = self._failure or self._as_os_error(error)
        finally:
            if stage.release is not None:
                stage.release()
        return True

    def wait(self) -> None:
        while self.finish_oldest():
            pass
        if self._failure is not None:
            raise self._failure


class _Pool:
    """Staging buffers uint8 [rows, stride] that begin at a page, `depth` on each device."""

    def __init__(self, depth: int, rows: int, stride: int) -> None:
        self.rows = rows
        self._stride, self._depth = stride, depth
        self._free: dict[int, list[Bytes]] = {}
        self._made: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, like: Bytes) -> Bytes | None:
        """A buffer on the device of `like`; None if all are in use."""
        device = _device(like)
        with self._lock:
            free = self._free.setdefault(device, [])
            if free:
                return free.pop()
            if self._made.get(device, 0) >= self._depth:
                return None
            self._made[device] = self._made.get(device, 0) + 1
        return self.make(like)

    def make(self, like: Bytes) -> Bytes:
        """A buffer on the device of `like`, of which the pool knows nothing."""
        if is_host(like):
            return aligned_rows(self.rows, self._stride)
        xp: Any = _cupy()
        with like.device:  # type: ignore[attr-defined]
            buffer: Bytes = xp.zeros((self.rows, self._stride), np.uint8)
        return buffer

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back, or let it go if there are enough."""
        with self._lock:
            free = self._free.setdefault(_device(buffer), [])
            if len(free) < self._depth:
                free.append(buffer)

    def clear(self) -> None:
        """Let all buffers go."""
        with self._lock:
            self._free.clear()
            self._made.clear()


def _kvikio(name: str) -> ModuleType:
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        raise MissingExtraError("kvikio", "cuda", "a tier that KvikIO reads and writes") from error
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{name}: KvikIO cannot be loaded ({error}): run pip install 'tierstore[cuda]' again"
        ) from error
    _check_driver(name)
    module: ModuleType = kvikio
    return module


def _check_driver(name: str) -> None:
    """ConfigError unless CUDA starts: KvikIO waits for ever where it does not."""
    try:
        status = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError as error:
        raise ConfigError(
            f"{name}: KvikIO needs the CUDA driver ({error}): install it, or use MmapTier"
        ) from error
    if status:
        raise ConfigError(
            f"{name}: the CUDA driver does not start (cuInit gives {status}): see that a GPU is "
            "there and may be used, or use MmapTier"
        )


def _medium(kvikio: Any, handle: Any) -> str:  # noqa: ANN401 (a package without types)
    if kvikio.defaults.is_compat_mode_preferred():
        way = "direct" if handle.is_direct_io_supported() else "through the page cache"
        return f"file (KvikIO in POSIX mode, {way})"
    if kvikio.cufile_driver.get("is_gds_available"):
        return "file (KvikIO, GPUDirect Storage)"
    return "file (KvikIO, cuFile in its compatibility mode)"


def _pages(spans: list[Range]) -> list[Range]:
    """The whole pages that cover `spans`, which are in order; neighbours joined."""
    pages: list[Range] = []
    for start, stop in spans:
        first, last = start // _PAGE * _PAGE, -(-stop // _PAGE) * _PAGE
        if pages and first <= pages[-1][1]:
            first = pages.pop()[0]
        pages.append((first, last))
    return pages


def _in_order(slots: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Both in the order of `slots`."""
    order = np.argsort(slots, kind="stable")
    return slots[order], rows[order]


def _runs(slots: Ids, rows: Ids) -> list[tuple[int, int]]:
    """First and end of the stretches where slots and rows both grow by one."""
    if not len(slots):
        return []
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(rows) != 1)) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    return list(pairwise(edges))


def _numbers(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def _cupy() -> ModuleType:
    from tierstore.arrays import cupy

    return cupy()


def _device(array: Bytes) -> int:
    return _HOST if is_host(array) else int(array.device.id)  # type: ignore[attr-defined]


def _settle(array: Bytes) -> None:
    """Let what a GPU has to do with `array` be done: KvikIO asks no stream."""
    if not is_host(array):
        _cupy().cuda.Device(_device(array)).synchronize()
