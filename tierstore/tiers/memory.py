"""What every tier in memory shares: slots at the bottom of one `Memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.interfaces import DONE, Bytes, Completion, Ids, Pointers, Tier
from tierstore.kernels.element import is_host
from tierstore.kernels.tables import copy_pieces, copy_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierstore.layout import BlockLayout
    from tierstore.memory import Memory
    from tierstore.staging import Staging


class MemoryTier(Tier):
    """Slots in a buffer that kernels read in place.

    staging: through it blocks go to a device; None where they are copied at once.
    """

    staging: Staging | None = None

    def __init__(self, layout: BlockLayout, memory: Memory, name: str) -> None:
        self.name = name
        self.layout = layout
        self._memory = memory
        self._slots = 0
        self._view: Bytes = memory.slots[:0].reshape(0, layout.block_bytes)

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def limit(self) -> int:
        room = self._memory.slot_bytes + self._memory.free_bytes
        return room // self.layout.block_bytes

    def resize(self, slots: int) -> None:
        size = slots * self.layout.block_bytes
        self._memory.resize_slots(size)
        self._slots = slots
        self._view = self._memory.slots[:size].reshape(slots, self.layout.block_bytes)

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
        """Memory has nothing to sync."""

    def close(self) -> None:
        self.resize(0)

    @property
    def is_addressable(self) -> bool:
        return True

    @property
    def view(self) -> Bytes:
        return self._view

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes


def send(
    source: Bytes,
    slots: Ids,
    out: Bytes,
    rows: Ids,
    spans: Sequence[tuple[int, int]],
    staging: Staging | None,
) -> Completion:
    """Copy spans of ``source[slots[i]]``, in host memory, to ``out[rows[i]]``, where that is."""
    if staging is not None and not is_host(out):
        return staging.send(source, slots, out, rows, spans)
    for start, stop in spans:
        copy(source, slots, out, rows, start, stop)
    return DONE


def copy(
    source: Bytes, source_rows: Ids, target: Bytes, target_rows: Ids, start: int, stop: int
) -> None:
    """target[target_rows, start:stop] = source[source_rows, start:stop], wherever they are."""
    if is_host(source) and is_host(target):
        word = _word(start | stop | source.shape[1] | target.shape[1])
        width = word.itemsize
        copy_rows(
            source.view(word),
            source_rows,
            target.view(word),
            target_rows,
            start // width,
            stop // width,
        )
        return
    across_devices(source, source_rows, target, target_rows, start, stop)


def _word(sizes: int) -> np.dtype[np.unsignedinteger]:
    """The widest unsigned integer that divides all sizes that were or-ed together."""
    return np.dtype(f"u{next(width for width in (8, 4, 2, 1) if not sizes % width)}")


def copy_pieces_of(
    source: Bytes, at: Pointers, target: Bytes, target_rows: Ids, start: int, stop: int
) -> None:
    """target[target_rows[i], start:stop] = source[at[i] + start : at[i] + stop].

    source: flat, in host memory.
    """
    if not is_host(target):
        rows = np.arange(len(at), dtype=np.int32)
        picked: Bytes = np.empty((len(at), target.shape[1]), np.uint8)
        copy_pieces_of(source, at, picked, rows, start, stop)
        across_devices(picked, rows, target, target_rows, start, stop)
        return
    word = _word(start | stop | source.size | target.shape[1] | int(np.bitwise_or.reduce(at)))
    width = word.itemsize
    copy_pieces(
        source.view(word), at // width, target.view(word), target_rows, start // width,
        stop // width,
    )  # fmt: skip


def across_devices(
    source: Bytes, source_rows: Ids, target: Bytes, target_rows: Ids, start: int, stop: int
) -> None:
    """`copy` where CuPy holds one side or both."""
    from tierstore.arrays import cupy

    xp = cupy()
    picked = source[source_rows, start:stop] if isinstance(source, np.ndarray) else (
        source[xp.asarray(source_rows), start:stop]
    )  # fmt: skip
    if is_host(target):
        target[target_rows, start:stop] = xp.asnumpy(picked)
    else:
        target[xp.asarray(target_rows), start:stop] = xp.asarray(picked)
