"""The fast tier: HBM where there is a GPU, ordinary memory where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.arrays import device_memory
from tierstore.sizes import parse_size
from tierstore.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from tierstore.layout import BlockLayout


class DeviceTier(MemoryTier):
    """Blocks in the memory of the device that computes attention.

    On a GPU arrays are CuPy's, which torch sees without a copy. Shrinking the slots there copies
    what stays, and holds both for that moment.
    """

    def __init__(
        self,
        layout: BlockLayout,
        limit: int | str,
        *,
        device: torch.device | str = "cpu",
        name: str = "fast",
    ) -> None:
        self.device = torch.device(device)
        super().__init__(layout, device_memory(self.device, parse_size(limit, name), name), name)

    @property
    def medium(self) -> str:
        return "GPU memory" if self.device.type == "cuda" else "ordinary memory (no GPU)"
