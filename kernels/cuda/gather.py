"""Blocks from pinned host memory to the device by their addresses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from tierstore.kernels.element import Array

WORD = 16
"""Bytes that a thread copies at once: addresses and sizes are multiples of it."""

THREADS = 256
"""Threads of a thread block."""

_BLOCKS_EACH = 4
"""Thread blocks for each multiprocessor, which saturate the bus several times over."""


def source() -> str:
    """The CUDA C++ source."""
    return Path(__file__).with_name("gather.cu").read_text()


class GatherFromHost:
    """The compiled kernel on the current device.

    Parameters
    ----------
    cupy: the CuPy module, as `tierstore.arrays.cupy` gives it or says which extra is missing.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._kernel = cupy.RawModule(code=source(), backend="nvrtc").get_function("gather_blocks")
        self._processors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])

    def __call__(self, addresses: Array, block_bytes: int, out: Array) -> None:
        """Copy blocks on the current stream; the memory must stay pinned until that is done.

        Parameters
        ----------
        addresses: uint64 [n] on the device: where each block begins in memory that is pinned and
            mapped, as the device sees it.
        block_bytes: size of a block. out: at least ``n * block_bytes`` contiguous bytes on the
            device. Addresses, the size and `out` are multiples of 16 bytes; ValueError where the
            size or `out` is not, or `out` is too small.
        """
        count = len(addresses)
        address = int(out.data.ptr)  # type: ignore[attr-defined]
        if block_bytes <= 0 or block_bytes % WORD or address % WORD:
            raise ValueError(
                f"block_bytes={block_bytes}, out at {address:#x}: expected multiples of {WORD}"
            )
        if out.nbytes < count * block_bytes:
            raise ValueError(
                f"out of {out.nbytes} bytes: expected at least {count * block_bytes} for {count} "
                f"blocks of {block_bytes}"
            )
        if not count:
            return
        words = count * block_bytes // WORD
        grid = min(-(-words // THREADS), self._processors * _BLOCKS_EACH)
        self._kernel((grid,), (THREADS,), (addresses, np.int64(count), np.int64(block_bytes), out))
