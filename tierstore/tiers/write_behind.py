"""A tier in front of a slow one, which takes writes at once and hands them on in the background."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.errors import ConfigError
from tierstore.interfaces import DONE, Bytes, Completion, Ids, Tier
from tierstore.sizes import parse_size
from tierstore.tiers.memory import copy

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierstore.memory import Memory

_PIECES = 64
"""The buffer has so many pieces: some fill, one is being written. A small write takes one, too."""


class _Piece(NamedTuple):
    """Blocks on their way: those of `slots`, in these rows of the buffer."""

    number: int
    slots: Ids
    rows: Ids


class WriteBehindTier(Tier):
    """Blocks of `tier`, of which the last ones written may still be in a buffer.

    A write copies into the buffer and returns; where that is full, it waits for the disk. Pieces
    reach `tier` in the order in which they were written, and reads find what is under way in the
    buffer. When `tier` refuses a piece, that stays in the buffer, readable; the next `write` or
    `sync` raises the error and has it tried again. What waits when the tier is closed is dropped:
    `sync` first if it matters.

    Parameters
    ----------
    tier: a tier that is not first in its chain; it belongs to this one from now on.
    memory: what the buffer is charged to. It is taken with the first slots and given back with the
        last: call ``resize(0)`` before you clear the memory.
    buffer: most bytes that wait.
    """

    def __init__(self, tier: Tier, memory: Memory, buffer: int | str) -> None:
        self.tier = tier
        self.name, self.layout = tier.name, tier.layout
        blocks = parse_size(buffer, "buffer") // self.layout.block_bytes
        if blocks < 2:
            raise ConfigError(
                f"buffer={buffer!r}: expected room for two blocks of {self.layout.block_bytes} "
                "bytes at least"
            )
        self._charged = memory
        self._pieces = min(blocks, _PIECES)
        self._piece_rows = blocks // self._pieces
        self._buffer: Bytes = np.empty((0, self.layout.block_bytes), np.uint8)
        self._row_of: Ids = np.empty(0, np.int32)
        """For each slot the row of the buffer where its block waits; -1 for none."""
        self._free = list(range(self._pieces))
        self._waiting: deque[_Piece] = deque()
        self._error: Exception | None = None
        # Who takes both takes `_moving` first. It is held while `tier` works: a tier need not take
        # reads beside writes.
        self._moving = threading.Lock()
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._process = os.getpid()
        self._end = weakref.finalize(self, _abandon, self._waiting, self._workers)

    @property
    def capacity(self) -> int:
        return self.tier.capacity

    @property
    def limit(self) -> int:
        return self.tier.limit

    @property
    def medium(self) -> str:
        return f"{self.tier.medium}, written behind"

    @property
    def is_lossless(self) -> bool:
        return self.tier.is_lossless

    @property
    def used_bytes(self) -> int:
        return self.tier.used_bytes

    @property
    def waiting_blocks(self) -> int:
        """Blocks that are not in `tier` yet."""
        with self._changed:
            return int((self._row_of >= 0).sum())

    def resize(self, slots: int) -> None:
        with self._moving, self._changed:
            if slots and not len(self._buffer):
                shape = self._pieces * self._piece_rows, self.layout.block_bytes
                self._buffer = self._charged.take(shape, np.uint8, "write-behind")
            self.tier.resize(slots)
            self._forget_from(slots)
            kept = self._row_of[:slots]
            self._row_of = np.full(slots, -1, np.int32)
            self._row_of[: len(kept)] = kept
            if not slots:
                self._give_buffer()

    def _forget_from(self, slot: int) -> None:
        """Let nothing wait for slots from `slot` on; both locks are held."""
        pieces = list(self._waiting)
        self._waiting.clear()
        for number, slots, rows in pieces:
            stays = slots < slot
            if stays.any():
                self._waiting.append(_Piece(number, slots[stays], rows[stays]))
            else:
                self._free.append(number)
        if not self._waiting:
            self._error = None
        self._changed.notify_all()

    def _give_buffer(self) -> None:
        if len(self._buffer):
            self._charged.give(self._buffer)
            self._buffer = np.empty((0, self.layout.block_bytes), np.uint8)

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        if parts is not None:
            self._flush()
            with self._moving:
                self.tier.write(slots, blocks, rows, parts).wait()
            return DONE
        self._raise_error()
        for start in range(0, len(slots), self._piece_rows):
            piece = slice(start, start + self._piece_rows)
            self._add(slots[piece].copy(), blocks, rows[piece])
        return DONE

    def _add(self, slots: Ids, blocks: Bytes, rows: Ids) -> None:
        """Put blocks into a piece of the buffer, once one is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._error is not None)
            self._raise_error()
            number = self._free.pop()
        first = number * self._piece_rows
        inside = np.arange(first, first + len(slots), dtype=np.int32)
        copy(blocks, rows, self._buffer, inside, 0, self.layout.block_bytes)
        with self._changed:
            self._row_of[slots] = inside
            self._waiting.append(_Piece(number, slots, inside))
            self._start()

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        if not self._waiting:
            return self.tier.read(slots, out, rows, parts)
        with self._changed:
            waiting_at = self._row_of[slots]
            waits = waiting_at >= 0
            for start, stop in self.layout.spans(parts):
                copy(self._buffer, waiting_at[waits], out, rows[waits], start, stop)
        if not waits.all():
            with self._moving:
                self.tier.read(slots[~waits], out, rows[~waits], parts).wait()
        return DONE

    def expect(self, slots: Ids) -> None:
        if not self._waiting:
            self.tier.expect(slots)

    def sync(self) -> None:
        self._flush()
        self.tier.sync()

    def close(self) -> None:
        if os.getpid() == self._process:  # a fork has the locks, but not the thread
            with self._moving, self._changed:
                self._forget_from(0)
                self._give_buffer()
        self.tier.close()
        self._row_of = self._row_of[:0]

    # The background

    def _raise_error(self) -> None:
        """Raise what `tier` refused a piece with, once; from now on it is tried again."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                self._start()
                raise error

    def _start(self) -> None:
        """Have a thread at work, which ends when nothing waits or a piece is refused."""
        if self._waiting and not self._workers and self._error is None:
            worker = threading.Thread(
                target=_work, args=(weakref.ref(self),), name="tierstore-write-behind", daemon=True
            )
            self._workers.append(worker)
            worker.start()

    def _flush(self) -> None:
        """Return when nothing waits; raise what a piece was refused with."""
        if os.getpid() != self._process:
            return
        self._raise_error()
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)
            self._raise_error()

    def hand_on(self) -> bool:
        """Bring the first piece that waits to `tier`; whether to go on. For the thread."""
        with self._moving:
            with self._changed:
                if not self._waiting:
                    self._leave(None)
                    return False
                number, slots, rows = self._waiting[0]
            try:
                self.tier.write(slots, self._buffer, rows).wait()
            except Exception as error:  # whatever it is, the caller must not wait for ever
                with self._changed:
                    self._leave(error)
                return False
            with self._changed:
                done = slots[self._row_of[slots] == rows]
                self._row_of[done] = -1
                if self._waiting:  # empty when the tier was abandoned meanwhile
                    self._waiting.popleft()
                self._free.append(number)
                self._changed.notify_all()
        return True

    def _leave(self, error: Exception | None) -> None:
        self._error = error
        self._workers.clear()
        self._changed.notify_all()


def _work(of: weakref.ref[WriteBehindTier]) -> None:
    while (tier := of()) is not None and tier.hand_on():
        del tier


def _abandon(waiting: deque[_Piece], workers: list[threading.Thread]) -> None:
    """Stop, and wait: a thread that is inside compiled code when Python ends may abort it."""
    waiting.clear()
    for worker in list(workers):
        if worker is not threading.current_thread():
            worker.join(1.0)
