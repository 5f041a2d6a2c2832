"""Copy scattered blocks of a tier to where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

TILE = 1024
"""Elements that a program copies."""


@triton.jit
def gather_kernel(pool, slots, out, elements, pool_stride, out_stride, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + block).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    part = tl.load(pool + slot * pool_stride + at, mask=at < elements)
    tl.store(out + block * out_stride + at, part, mask=at < elements)


def gather_blocks(pool: Array, slots: Array, out: Array) -> None:
    """Let ``out[i]`` be ``pool[slots[i]]``: elements [slots, e]; integers [n]; elements [n, e]."""
    blocks, at, result = tensors(pool, slots, out)
    elements = blocks.shape[1]
    launch(
        gather_kernel, (len(at), tiles(elements, TILE)), blocks, at, result, elements,
        blocks.stride(0), result.stride(0), TILE=TILE,
    )  # fmt: skip
