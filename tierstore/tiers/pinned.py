"""The DRAM tier: page-locked where CUDA is there to use it, plain memory elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.memory import Memory
from tierstore.sizes import parse_size
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from tierstore.layout import BlockLayout


class PinnedTier(MemoryTier):
    """Blocks in host memory. `is_pinned` says whether the pages are locked for the GPU's copy engine."""

    def __init__(self, layout: BlockLayout, limit: int | str, *, name: str = "dram") -> None:
        memory = Memory(parse_size(limit, name), name)
        super().__init__(layout, memory, name)
        self.is_pinned = False
        if torch.cuda.is_available():
            status = torch.cuda.cudart().cudaHostRegister(
                memory.slots.ctypes.data, memory.limit_bytes, 0
            )
            self.is_pinned = int(status) == 0

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.slots.ctypes.data)
            self.is_pinned = False
        super().close()
