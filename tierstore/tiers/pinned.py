"""The DRAM tier: page-locked where CUDA is there to use it, plain memory elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.memory import HostBuffer, Memory
from tierstore.sizes import parse_size
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from tierstore.layout import BlockLayout


class PinnedTier(MemoryTier):
    """Blocks in host memory. `is_pinned`: the pages are locked for the GPU's copy engine."""

    def __init__(self, layout: BlockLayout, limit: int | str, *, name: str = "dram") -> None:
        limit_bytes = parse_size(limit, name)
        self._buffer = HostBuffer(limit_bytes, name)
        super().__init__(layout, Memory(limit_bytes, name, slots=self._buffer), name)
        if torch.cuda.is_available():
            address = self._buffer.array.ctypes.data
            status = torch.cuda.cudart().cudaHostRegister(address, limit_bytes, 0)
            self._buffer.is_locked = int(status) == 0

    @property
    def is_pinned(self) -> bool:
        """Whether the pages are locked."""
        return self._buffer.is_locked

    @property
    def medium(self) -> str:
        return "page-locked memory" if self.is_pinned else "ordinary memory"

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.array.ctypes.data)
            self._buffer.is_locked = False
        super().close()
