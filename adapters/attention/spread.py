"""Rows of a call spread over the lanes of a batch, and gathered again."""

from __future__ import annotations

import torch


class Spread:
    """Spreads over the same lanes until it is told others; its buffers are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._index = torch.empty(0, dtype=torch.int64)
        self._lanes: list[int] = []
        self._count = 0
        self.taking: torch.Tensor | None = None
        """bool [lanes, 1], those that take part; None where each does, in order."""

    def over(self, lanes: list[int], count: int, device: torch.device) -> None:
        """Spread over these of `count` lanes from now on."""
        if (lanes, count) == (self._lanes, self._count):
            return
        self._lanes, self._count = lanes, count
        self._index = torch.tensor(lanes, dtype=torch.int64, device=device)
        self.taking = None
        if lanes != list(range(count)):
            self.taking = torch.zeros(count, 1, dtype=torch.bool, device=device)
            self.taking[self._index] = True

    def out(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, ...] in their lanes; what stands in the others means nothing."""
        if self.taking is None:
            return rows
        shape = (self._count, *rows.shape[1:])
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != rows.dtype:
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(mode=False):
                buffer = torch.zeros(shape, dtype=rows.dtype, device=rows.device)
            self._buffers[name] = buffer
        return buffer.index_copy_(0, self._index, rows)

    def back(self, lanes: torch.Tensor) -> torch.Tensor:
        """The rows of the call from what came out for all lanes."""
        return lanes if self.taking is None else lanes.index_select(0, self._index)
