"""Look a selection up in a directory that is mirrored on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tierstore.kernels.tables import CHUNK
from tierstore.kernels.triton.launch import launch, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

TILE = 256
"""Blocks of a program."""


@triton.jit
def judge_kernel(chunks, blocks_of, segments, row_ptr, blocks, slot_of, valid_of, last_used, step,
                 handles, slots, valid, tally, chunk_stride, CHUNK: tl.constexpr,
                 TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(row_ptr + row)
    i = start + tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < tl.load(row_ptr + row + 1)
    segment = tl.load(segments + row).to(tl.int64)
    block = tl.load(blocks + i, mask=inside, other=0)
    is_known = inside & (block >= 0) & (block < tl.load(blocks_of + segment))
    chunk = tl.load(chunks + segment * chunk_stride + block // CHUNK, mask=is_known, other=0)
    handle = chunk * CHUNK + block % CHUNK
    slot = tl.load(slot_of + handle, mask=is_known, other=0)
    tl.store(handles + i, handle, mask=is_known)
    tl.store(slots + i, slot, mask=is_known)
    tl.store(valid + i, tl.load(valid_of + handle, mask=is_known, other=0), mask=is_known)
    stamp = tl.full((TILE,), 0, last_used.dtype.element_ty) + step
    before = tl.atomic_xchg(last_used + handle, stamp, mask=is_known)
    is_bad = inside & (~is_known | (before == step))
    tl.atomic_add(tally, tl.sum((is_known & (slot < 0)).to(tl.int32), 0))
    tl.atomic_min(tally + 1, tl.min(tl.where(is_bad, i, 2147483647), 0).to(tl.int32))


def judge(
    chunks: Array,
    blocks_of: Array,
    segments: Array,
    row_ptr: Array,
    blocks: Array,
    slot_of: Array,
    valid_of: Array,
    last_used: Array,
    step: int,
    handles: Array,
    slots: Array,
    valid: Array,
) -> int:
    """As `tierstore.kernels.tables.judge`; of a block selected twice either place is named.

    Requires: row pointers that cover the blocks, on the host; they alone decide the grid.
    """
    longest = int((row_ptr[1:] - row_ptr[:-1]).max(initial=0))
    table, count, segment, pointers, block, *state = tensors(
        chunks, blocks_of, segments, row_ptr, blocks, slot_of, valid_of, last_used, handles, slots,
        valid,
    )  # fmt: skip
    tally = torch.tensor([0, 2**31 - 1], dtype=torch.int32, device=table.device)
    launch(
        judge_kernel, (len(segment), tiles(longest, TILE)), table, count, segment, pointers, block,
        *state[:3], step, *state[3:], tally, table.stride(0), CHUNK=CHUNK, TILE=TILE,
    )  # fmt: skip
    misses, bad = tally.tolist()
    return int(misses if bad == 2**31 - 1 else -1 - bad)
