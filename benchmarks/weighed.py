"""Memory whose accountant is checked: what it says beside what is really there."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.memory import Memory
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout


class WeighedTier(MemoryTier):
    """A memory tier that knows which of the arrays taken from its limit are still alive."""

    def __init__(self, layout: BlockLayout, limit_bytes: int, name: str) -> None:
        self._alive: list[weakref.ref[Array]] = []
        memory = Memory(limit_bytes, name, allocate=self._allocate)
        super().__init__(layout, memory, name)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = np.zeros(shape, dtype)
        self._alive.append(weakref.ref(array))
        return array

    @property
    def true_bytes(self) -> int:
        """Bytes of the slots, and of the arrays that exist."""
        self._alive = [each for each in self._alive if each() is not None]
        arrays = [array for each in self._alive if (array := each()) is not None]
        return self.capacity * self.layout.block_bytes + sum(array.nbytes for array in arrays)


def resident_bytes() -> int:
    """Bytes of this process in memory, as the system counts them; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
