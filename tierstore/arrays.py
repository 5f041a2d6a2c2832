"""The array modules: NumPy always, CuPy when a GPU tier is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.errors import ConfigError, MissingExtraError
from tierstore.kernels.element import to_array
from tierstore.memory import Memory

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from tierstore.kernels.element import Array


def cupy() -> ModuleType:
    """The CuPy module; MissingExtraError names the extra when it is not installed."""
    try:
        import cupy as module
    except ImportError as error:
        raise MissingExtraError("cupy", "cuda", "a tier in GPU memory") from error
    found: ModuleType = module
    return found


def as_array(tensor: torch.Tensor) -> Array:
    """The elements of a tensor as NumPy or, on a GPU, CuPy array that shares its memory."""
    if tensor.device.type != "cpu":
        cupy()
    return to_array(tensor)


class CupyBuffer:
    """Bytes for slots in GPU memory."""

    def __init__(self, xp: ModuleType, device: int) -> None:
        self._xp, self._device = xp, device
        self.array = self._empty(0)

    def _empty(self, nbytes: int) -> Array:
        with self._xp.cuda.Device(self._device):
            array: Array = self._xp.empty(nbytes, np.uint8)
            return array

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

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        with xp.cuda.Device(number):
            array: Array = xp.zeros(shape, dtype)
            return array

    return Memory(limit_bytes, name, allocate=allocate, slots=CupyBuffer(xp, number))
