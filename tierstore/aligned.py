"""Memory that begins at multiples of 4 KiB, as direct reads and drivers ask for."""

from __future__ import annotations

import mmap
import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import CapacityError, ConfigError
from tierstore.reads import LateReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Bytes, Pointers

ALIGNMENT = mmap.PAGESIZE
"""A page of the system's memory: 4 KiB, or a multiple of it."""


def aligned_rows(count: int, nbytes: int) -> Bytes:
    """A zeroed array uint8 [count, nbytes] that begins at a multiple of `ALIGNMENT`.

    MemoryError if the system does not give so much.
    """
    size = count * nbytes
    try:
        # Shared pages, the default, would be those of a fork too, which then changes ours.
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of aligned memory: {error}") from error
    return np.frombuffer(pages, np.uint8, size).reshape(count, nbytes)


class AlignedBuffers:
    """A fixed number of buffers at multiples of 4 KiB, taken and given back; any thread may.

    Parameters
    ----------
    block_bytes: size of a buffer.
    count: how many there are.
    """

    def __init__(self, block_bytes: int, count: int) -> None:
        if block_bytes <= 0 or count <= 0:
            raise ConfigError(
                f"AlignedBuffers({block_bytes}, {count}): expected a size and a number above 0"
            )
        stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.memory = aligned_rows(1, stride * count).reshape(-1)
        """uint8, what all buffers are parts of."""
        pages = self.memory.data
        self.block_bytes = block_bytes
        self.nbytes = stride * count
        """Bytes of all buffers together."""
        self._free = [pages[at : at + block_bytes] for at in range(0, self.nbytes, stride)]
        self._offsets = {id(buffer): stride * i for i, buffer in enumerate(self._free)}
        self._taken: dict[int, memoryview] = {}
        self._given = threading.Condition()

    @property
    def free(self) -> int:
        """Buffers that nobody has."""
        return len(self._free)

    def take(self, count: int = 1, deadline: float | None = None) -> list[memoryview]:
        """From one to `count` buffers of `block_bytes`: what is free, but wait for the first.

        CapacityError if there is none after `deadline` seconds. Give back what you hold before you
        wait for more, or everybody waits for ever.
        """
        with self._given:
            if not self._given.wait_for(lambda: self._free, deadline):
                raise CapacityError(
                    f"none of {len(self._taken)} staging buffers became free in {deadline} s: "
                    "read less at once, or have more of them"
                )
            taken, self._free = self._free[-count:], self._free[:-count]
            self._taken.update((id(buffer), buffer) for buffer in taken)
            return taken

    def offsets(self, buffers: Sequence[memoryview]) -> Pointers:
        """Where in `memory` buffers from `take` begin."""
        return np.array([self._offsets[id(buffer)] for buffer in buffers], np.int64)

    def give(
        self, buffers: Sequence[memoryview], outcomes: Sequence[Exception | None] = ()
    ) -> None:
        """Return buffers from `take`: those very objects, each once.

        outcomes: of the reads into them, one each. A buffer of a late read becomes free when the
        read is settled.
        """
        late = [outcome for outcome in outcomes if isinstance(outcome, LateReadError)]
        if not late:
            self._free_again(buffers)
            return
        for buffer, outcome in zip(buffers, outcomes, strict=True):
            if isinstance(outcome, LateReadError):
                outcome.when_settled(partial(self._free_again, [buffer]))
            else:
                self._free_again([buffer])

    def _free_again(self, buffers: Sequence[memoryview]) -> None:
        with self._given:
            for buffer in buffers:
                del self._taken[id(buffer)]
                self._free.append(buffer)
            self._given.notify(len(buffers))
