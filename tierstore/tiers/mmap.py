"""A tier in one preallocated file, read and written through a memory map."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.interfaces import DONE, Bytes, Completion, Ids, Tier
from tierstore.sizes import format_size, parse_size
from tierstore.tiers.memory import copy

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierstore.layout import BlockLayout

_PAGE = mmap.PAGESIZE


class MmapTier(Tier):
    """Blocks in a file that the kernel caches and writes back as it sees fit.

    The file is scratch: it has no header and is created anew (0600, links not followed). Its blocks
    are preallocated, so a full disk is an error of `resize` and never a SIGBUS later.

    ConfigError if the file exists or cannot be made.
    """

    def __init__(
        self,
        layout: BlockLayout,
        path: str | Path,
        limit: int | str | None = None,
        *,
        name: str = "disk",
    ) -> None:
        self.name = name
        self.layout = layout
        self.path = Path(path)
        self._limit_bytes = None if limit is None else parse_size(limit, name)
        self._slots = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{name}: {str(self.path)!r} cannot be made ({error.strerror}): blocks there are "
                "scratch and never read again, so remove it or choose another path"
            ) from error
        self._map: mmap.mmap | None = None
        self._view: Bytes = np.empty((0, layout.block_bytes), np.uint8)

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def limit(self) -> int:
        stats = os.fstatvfs(self._fd)
        room = self._slots * self.layout.block_bytes + stats.f_bavail * stats.f_frsize
        if self._limit_bytes is not None:
            room = min(room, self._limit_bytes)
        return room // _PAGE * _PAGE // self.layout.block_bytes

    @property
    def used_bytes(self) -> int:
        return self._file_bytes(self._slots)

    def _file_bytes(self, slots: int) -> int:
        return -(-slots * self.layout.block_bytes // _PAGE) * _PAGE

    def resize(self, slots: int) -> None:
        size = self._file_bytes(slots)
        if self._limit_bytes is not None and size > self._limit_bytes:
            raise CapacityError(
                f"{self.name}: {slots} blocks take {format_size(size)}, over the limit of "
                f"{format_size(self._limit_bytes)}: raise the limit"
            )
        if slots:
            self._check_size()
        if size > self.used_bytes:
            self._preallocate(size)
        self._map_again(slots, size)
        os.ftruncate(self._fd, size)

    def _check_size(self) -> None:
        found = os.fstat(self._fd).st_size
        if found != self.used_bytes:
            raise TierOfflineError(
                f"{self.name}: {str(self.path)!r} has {found} bytes, expected {self.used_bytes}: "
                "something else changed it"
            )

    def _preallocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            os.ftruncate(self._fd, self.used_bytes)
            raise CapacityError(
                f"{self.name}: no {format_size(size)} in {str(self.path)!r} ({error.strerror}): "
                "free disk space, choose another directory or lower the context"
            ) from error

    def _map_again(self, slots: int, size: int) -> None:
        self._map = mmap.mmap(self._fd, size) if size else None
        self._slots = slots
        self._view = np.empty((0, self.layout.block_bytes), np.uint8)
        if self._map is not None:
            whole = np.frombuffer(self._map, np.uint8, slots * self.layout.block_bytes)
            self._view = whole.reshape(slots, self.layout.block_bytes)

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        for start, stop in self.layout.spans(parts):
            copy(self._view, slots, out, rows, start, stop)
        return DONE

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        for start, stop in self.layout.spans(parts):
            copy(blocks, rows, self._view, slots, start, stop)
        return DONE

    def sync(self) -> None:
        if self._map is not None:
            self._map.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._slots = 0
            self._view = np.empty((0, self.layout.block_bytes), np.uint8)
            self._map = None

    @property
    def medium(self) -> str:
        return "file"

    @property
    def is_addressable(self) -> bool:
        return True

    @property
    def view(self) -> Bytes:
        return self._view
