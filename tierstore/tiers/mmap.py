"""A tier in one preallocated file, read and written through a memory map."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from tierstore.interfaces import DONE, Bytes, Completion, Ids, Tier
from tierstore.tiers.memory import copy, send
from tierstore.tiers.scratch import ScratchFile

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tierstore.layout import BlockLayout
    from tierstore.staging import Staging

_PAGE = mmap.PAGESIZE


class MmapTier(Tier):
    """Blocks in a file that the kernel caches and writes back as it sees fit.

    The file is scratch: it has no header and is created anew (0600, links not followed). Its blocks
    are preallocated, so a full disk is an error of `resize` and never a SIGBUS later.

    ConfigError if the file exists or cannot be made.

    staging: through it blocks go to a device, as long as there are slots; None where they are
        copied at once.
    """

    staging: Staging | None = None

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
        self._file = ScratchFile(path, limit, name)
        self.path = self._file.path
        self._slots = 0
        self._map: mmap.mmap | None = None
        self._view: Bytes = np.empty((0, layout.block_bytes), np.uint8)

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def limit(self) -> int:
        return self._file.limit_bytes // _PAGE * _PAGE // self.layout.block_bytes

    @property
    def used_bytes(self) -> int:
        return self._file.size

    def resize(self, slots: int) -> None:
        size = -(-slots * self.layout.block_bytes // _PAGE) * _PAGE
        if self.staging is not None:
            self.staging.open() if slots else self.staging.close()
        self._file.reserve(size, slots)
        self._map_again(slots, size)
        self._file.cut(size)

    def _map_again(self, slots: int, size: int) -> None:
        self._map = mmap.mmap(self._file.fd, size) if size else None
        self._slots = slots
        self._view = np.empty((0, self.layout.block_bytes), np.uint8)
        if self._map is not None:
            whole = np.frombuffer(self._map, np.uint8, slots * self.layout.block_bytes)
            self._view = whole.reshape(slots, self.layout.block_bytes)

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        return send(self._view, slots, out, rows, self.layout.spans(parts), self.staging)

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        for start, stop in self.layout.spans(parts):
            copy(blocks, rows, self._view, slots, start, stop)
        return DONE

    def sync(self) -> None:
        if self._map is not None:
            self._map.flush()
        self._file.sync()

    def close(self) -> None:
        if self.staging is not None:
            self.staging.close()
        self._file.close()
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
