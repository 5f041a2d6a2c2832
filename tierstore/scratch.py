"""Work space that is taken once and reused at every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array, valid until `name` is asked for again."""
        dtype = np.dtype(dtype)
        size = math.prod(shape)
        nbytes = size * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            if buffer is not None:
                self._memory.give(buffer)
                del self._buffers[name]
            room = nbytes + nbytes // 4 + -(nbytes + nbytes // 4) % 64
            buffer = self._buffers[name] = self._memory.take(room, np.uint8, "work space")
        return buffer[:nbytes].view(dtype).reshape(shape)
