"""The DRAM tier: page-locked where CUDA is there to use it, plain memory elsewhere."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from tierstore.memory import HostBuffer, Memory
from tierstore.sizes import parse_size
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes
    from tierstore.layout import BlockLayout

_LOCKED_AT_ONCE = 64 << 30
"""Drivers refuse to lock more in one call."""


class PinnedTier(MemoryTier):
    """Blocks in host memory. `is_pinned`: the pages are locked for the GPU's copy engine.

    All pages are locked or none: when the driver refuses some, the tier is ordinary memory, and
    `medium` says why.
    """

    def __init__(self, layout: BlockLayout, limit: int | str, *, name: str = "dram") -> None:
        limit_bytes = parse_size(limit, name)
        self._buffer = HostBuffer(limit_bytes, name)
        super().__init__(layout, Memory(limit_bytes, name, slots=self._buffer), name)
        self._locked: list[int] = []
        self._refusal = ""
        if torch.cuda.is_available():
            self._lock()

    def _lock(self) -> None:
        cudart = torch.cuda.cudart()
        for address, nbytes in _pieces(self._buffer.array):
            status = cudart.cudaHostRegister(address, nbytes, 0)
            if int(status) != 0:
                self._refusal = f"page-locking failed: {cudart.cudaGetErrorString(status)}"
                self._unlock()
                forget_error()
                return
            self._locked.append(address)
        self._buffer.is_locked = True

    def _unlock(self) -> None:
        self._buffer.is_locked = False
        while self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked.pop())

    @property
    def is_pinned(self) -> bool:
        """Whether the pages are locked."""
        return self._buffer.is_locked

    @property
    def medium(self) -> str:
        if self.is_pinned:
            return "page-locked memory"
        return f"ordinary memory ({self._refusal})" if self._refusal else "ordinary memory"

    def close(self) -> None:
        self._unlock()
        super().close()


def _pieces(array: Bytes) -> list[tuple[int, int]]:
    """Address and bytes of the pieces that are locked one by one."""
    start = array.ctypes.data
    return [
        (start + first, min(_LOCKED_AT_ONCE, array.nbytes - first))
        for first in range(0, array.nbytes, _LOCKED_AT_ONCE)
    ]


def forget_error() -> None:
    """Take up CUDA's pending error, which the next kernel would otherwise be blamed for."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
