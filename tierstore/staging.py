"""Page-locked buffers through which blocks go from host memory to a device while others go on."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.aligned import ALIGNMENT
from tierstore.errors import ConfigError
from tierstore.tiers.memory import copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Bytes, Completion, Ids
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout
    from tierstore.memory import Memory


class DeviceCopies(Protocol):
    """Moves bytes from host memory to a device."""

    def lock(self, pages: Bytes) -> None:
        """Let the device read these pages by itself, if it can; copies are right either way."""

    def unlock(self, pages: Bytes) -> None:
        """The pages, locked before, are about to go."""

    def begin(self, blocks: Bytes, out: Array, rows: Ids, start: int, stop: int) -> Completion:
        """Copy ``blocks[i, start:stop]`` to ``out[rows[i], start:stop]``.

        Until that has been waited for, nobody else touches `blocks`. If it raises, nothing is under
        way.
        """


class _Copy:
    """One copy under way; several may wait for it, and each hears what went wrong."""

    def __init__(self, completion: Completion) -> None:
        self._completion: Completion | None = completion
        self._error: Exception | None = None
        self._waiting = threading.Lock()

    def wait(self) -> None:
        with self._waiting:
            if self._completion is not None:
                try:
                    self._completion.wait()
                except Exception as error:
                    self._error = error
                self._completion = None
        if self._error is not None:
            raise self._error


class _Copies:
    """All copies of one call: none is under way when `wait` returns or raises."""

    def __init__(self, copies: Sequence[_Copy]) -> None:
        self._copies = copies

    def wait(self) -> None:
        errors = []
        for each in self._copies:
            try:
                each.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Staging:
    """A few buffers, used in turn: one is filled again once its copy to the device is done.

    Any thread may send; the buffers serve one call after the other.

    Parameters
    ----------
    memory: what the buffers are charged to, from `open` to `close`.
    buffer_bytes, count: of each buffer, and how many.
    """

    def __init__(
        self,
        layout: BlockLayout,
        memory: Memory,
        copies: DeviceCopies,
        *,
        buffer_bytes: int = 1 << 20,
        count: int = 4,
    ) -> None:
        blocks = buffer_bytes // layout.block_bytes
        if blocks < 1 or count < 1:
            raise ConfigError(
                f"buffer_bytes={buffer_bytes}, count={count} for staging: expected one buffer at "
                f"least, with room for a block of {layout.block_bytes} bytes"
            )
        self._shape = count, blocks, layout.block_bytes
        self._memory, self._copies = memory, copies
        self._taken: Bytes | None = None
        self._under_way: list[_Copy | None] = [None] * count
        self._next = 0
        self._sending = threading.Lock()

    def open(self) -> None:
        """Take the buffers; CapacityError if they do not fit. A second call does nothing."""
        if self._taken is None:
            nbytes = int(np.prod(self._shape))
            self._taken = self._memory.take(nbytes + ALIGNMENT, np.uint8, "staging")
            first = -self._taken.ctypes.data % ALIGNMENT
            self._pages = self._taken[first : first + nbytes]
            self._buffers = self._pages.reshape(self._shape)
            self._copies.lock(self._pages)

    def close(self) -> None:
        """Give the buffers back when nothing is under way; a second call does nothing."""
        if self._taken is not None:
            with self._sending:
                for number in range(len(self._under_way)):
                    self._settle(number)
            self._copies.unlock(self._pages)
            self._memory.give(self._taken)
            del self._pages, self._buffers
            self._taken = None

    def send(
        self, source: Bytes, slots: Ids, out: Array, rows: Ids, spans: Sequence[tuple[int, int]]
    ) -> Completion:
        """Begin to copy ``source[slots[i]]`` to ``out[rows[i]]``, those spans of bytes of each.

        `source` is not read any more when this returns. If it raises, nothing is under way.
        """
        begun: list[_Copy] = []
        each = self._shape[1]
        try:
            with self._sending:
                for start, stop in spans:
                    for first in range(0, len(slots), each):
                        part = slice(first, first + each)
                        begun.append(self._begin(source, slots[part], out, rows[part], start, stop))
        except BaseException:
            with suppress(Exception):
                _Copies(begun).wait()
            raise
        return _Copies(begun)

    def _begin(
        self, source: Bytes, slots: Ids, out: Array, rows: Ids, start: int, stop: int
    ) -> _Copy:
        number = self._next
        self._settle(number)
        blocks = self._buffers[number, : len(slots)]
        copy(source, slots, blocks, np.arange(len(slots), dtype=np.int32), start, stop)
        begun = _Copy(self._copies.begin(blocks, out, rows, start, stop))
        self._under_way[number] = begun
        self._next = (number + 1) % len(self._under_way)
        return begun

    def _settle(self, number: int) -> None:
        """Return when a buffer is free; what went wrong is told to whom the copy belongs."""
        under_way = self._under_way[number]
        if under_way is not None:
            with suppress(Exception):
                under_way.wait()
            self._under_way[number] = None
