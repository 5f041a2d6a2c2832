"""Work space that is taken once and reused at every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tierstore.kernels.element import Array
    from tierstore.memory import Memory


class Scratch:
    """Named buffers inside a memory limit; each grows to the largest size asked for so far."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: dict[str, Array] = {}
        self._views: dict[str, tuple[tuple[int, ...], npt.DTypeLike, Array]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array, valid until `name` is asked for again."""
        known = self._views.get(name)
        if known is not None and known[0] == shape and known[1] is dtype:
            return known[2]
        view = self._view(name, shape, np.dtype(dtype))
        self._views[name] = (shape, dtype, view)
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = math.prod(shape)
        nbytes = size * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            if buffer is not None:
                self._memory.give(buffer)
                del self._buffers[name]
            # Room to grow comes out of what is free, never out of the slots.
            room = max(nbytes, min(nbytes + nbytes // 4, self._memory.free_bytes))
            buffer = self._buffers[name] = self._memory.take(room, np.uint8, "work space")
        return buffer[:nbytes].view(dtype).reshape(shape)
