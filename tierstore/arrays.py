"""The array modules: NumPy always, CuPy when a GPU tier is asked for."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError, MissingExtraError
from tierstore.memory import Memory

if TYPE_CHECKING:
    import torch


def cupy() -> Any:
    """The CuPy module; MissingExtraError names the extra when it is not installed."""
    try:
        import cupy as module
    except ImportError as error:
        raise MissingExtraError("cupy", "cuda", "a tier in GPU memory") from error
    return module


class CupyBuffer:
    """Bytes for slots in GPU memory."""

    def __init__(self, xp: Any, device: int) -> None:
        self._xp, self._device = xp, device
        self.array = self._empty(0)

    def _empty(self, nbytes: int) -> Any:
        with self._xp.cuda.Device(self._device):
            return self._xp.empty(nbytes, np.uint8)

    def resize(self, nbytes: int) -> None:
        """Have room for `nbytes`, keeping what fits."""
        if nbytes != len(self.array):
            old, kept = self.array, min(nbytes, len(self.array))
            self.array = self._empty(nbytes)
            self.array[:kept] = old[:kept]


def device_memory(device: torch.device, limit_bytes: int, name: str) -> Memory:
    """A memory limit on `device`; ConfigError if it is neither a CPU nor a CUDA device."""
    if device.type == "cpu":
        return Memory(limit_bytes, name)
    if device.type != "cuda":
        raise ConfigError(f"device {str(device)!r}: expected 'cpu' or 'cuda': move the model first")
    xp, number = cupy(), device.index or 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with xp.cuda.Device(number):
            return xp.zeros(shape, dtype)

    return Memory(limit_bytes, name, allocate=allocate, slots=CupyBuffer(xp, number))
