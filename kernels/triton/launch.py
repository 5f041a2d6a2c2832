"""How arrays get to Triton kernels, and how large the tiles are that they work on."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tierstore.kernels.element import Array, to_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

NARROWEST = 16
"""Least extent of a tile that enters a matrix product."""


_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, acc):
    """``a @ b + acc`` in float32, of two operands of one type."""
    if _INTERPRETED:
        # The interpreter (Triton 3.9) would multiply the bit patterns of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 rounded to `dtype`, to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter (Triton 3.9) would cut the low bits off.
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


def tensors(*arrays: Array) -> list[torch.Tensor]:
    """Tensors that share memory with arrays; what is not on the first one's device is copied."""
    first, *others = (to_tensor(array) for array in arrays)
    return [first, *(other.to(first.device, non_blocking=True) for other in others)]


def target(array: Array, device: torch.device) -> torch.Tensor:
    """What a kernel on `device` fills; ValueError unless it is there, and packed."""
    tensor = to_tensor(array)
    if tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"an output of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}: expected a packed one on {device}"
        )
    return tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel where its first argument is; an empty grid is no work.

    Multiplications and additions are not fused, so that codes equal those of the CPU.
    """
    if not all(grid):
        return
    run: Callable[[], object] = lambda: kernel[grid](  # noqa: E731
        *arguments, **constants, enable_fp_fusion=False
    )
    device = arguments[0].device
    if device.type == "cpu":
        run()
        return
    with torch.cuda.device(device):
        run()


def padded(extent: int) -> int:
    """The power of two, at least `NARROWEST`, that a dimension is padded to."""
    return max(NARROWEST, int(triton.next_power_of_2(extent)))


def tile_of(width: int, element_bytes: int) -> int:
    """Units or tokens, `width` elements each, of a tile that enters products: registers hold it.

    64 of up to 128 elements of 16 bits, half as many of 32 bits, and of twice the width.
    """
    return max(NARROWEST, 128 * 128 // (max(width, 128) * element_bytes))


def tiles(extent: int, tile: int) -> int:
    """Tiles that cover an extent."""
    return -(-extent // tile)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; two where there is none and Triton interprets."""
    if device.type == "cpu":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
