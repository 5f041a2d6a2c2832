"""Pick the best units of each row within its budget."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tierstore.kernels.element import Array, to_tensor
from tierstore.kernels.triton.launch import launch, tensors

TILE = 1024
"""Units that a program looks at together."""


@triton.jit
def ordered(score):
    """Unsigned integers in the order of floats; both zeros are one."""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def cut_kernel(scores, counts, costs, budgets, cuts, found, score_stride, cost_stride,
               TILE: tl.constexpr):  # fmt: skip
    """The greatest score such that units from it on cost the budget, four bits at a time."""
    row = tl.program_id(0).to(tl.int64)
    n, budget = tl.load(counts + row), tl.load(budgets + row)
    digit = tl.arange(0, 16).to(tl.uint32)
    cut = tl.zeros((), tl.uint32)
    available = tl.zeros((), tl.int32)
    for step in tl.static_range(8):
        tried = cut + (digit << (28 - 4 * step))
        spent = tl.zeros((16,), tl.int32)
        for first in range(0, n, TILE):
            unit = first + tl.arange(0, TILE)
            key = ordered(tl.load(scores + row * score_stride + unit, mask=unit < n, other=0.0))
            cost = tl.load(costs + row * cost_stride + unit, mask=unit < n, other=0)
            spent += tl.sum(tl.where(key[None, :] >= tried[:, None], cost[None, :], 0), 1)
        if step == 0:
            available = tl.max(spent, 0)
        cut = tl.max(tl.where(spent >= budget, tried, cut), 0)
    tl.store(cuts + row, cut.to(tl.int64))
    tl.store(found + row, tl.minimum(available, budget))


@triton.jit
def write_kernel(
    scores,
    counts,
    costs,
    unit_ptr,
    unit_blocks,
    cuts,
    row_ptr,
    ids,
    out_scores,
    score_stride,
    cost_stride,
    ptr_stride,
    block_stride,
    TILE: tl.constexpr,
):
    """First the units above the cut, then those at it, each in unit order."""
    row = tl.program_id(0).to(tl.int64)
    n, cut = tl.load(counts + row), tl.load(cuts + row).to(tl.uint32)
    at, stop = tl.load(row_ptr + row), tl.load(row_ptr + row + 1)
    for ties in tl.static_range(2):
        for first in range(0, n, TILE):
            unit = first + tl.arange(0, TILE)
            inside = unit < n
            score = tl.load(scores + row * score_stride + unit, mask=inside, other=0.0)
            key = ordered(score)
            is_picked = inside & (key == cut if ties else key > cut)
            cost = tl.load(costs + row * cost_stride + unit, mask=is_picked, other=0)
            start = tl.load(unit_ptr + row * ptr_stride + unit, mask=is_picked, other=0)
            place = at + tl.cumsum(cost, 0) - cost
            for i in range(tl.max(cost, 0)):
                is_written = (i < cost) & (place + i < stop)
                block = tl.load(
                    unit_blocks + row * block_stride + start + i, mask=is_written, other=0
                )
                tl.store(ids + place + i, block, mask=is_written)
                tl.store(out_scores + place + i, score, mask=is_written)
            at += tl.sum(cost, 0)


def select_blocks(
    scores: Array,
    counts: Array,
    costs: Array,
    unit_ptr: Array,
    unit_blocks: Array,
    budgets: Array,
    row_ptr: Array,
    ids: Array,
    out_scores: Array,
) -> int:
    s, n, cost, start, blocks, budget = tensors(
        scores, counts, costs, unit_ptr, unit_blocks, budgets
    )
    rows = len(n)
    strides = [0 if table.shape[0] == 1 else table.stride(0) for table in (cost, start, blocks)]
    cuts = s.new_empty(rows, dtype=torch.int64)
    pointers = s.new_zeros(rows + 1, dtype=torch.int64)
    launch(
        cut_kernel, (rows,), s, n, cost, budget, cuts, pointers[1:], s.stride(0), strides[0],
        TILE=TILE,
    )  # fmt: skip
    pointers.cumsum_(0)
    picked, best = tensors(scores, ids, out_scores)[1:]
    launch(
        write_kernel, (rows,), s, n, cost, start, blocks, cuts, pointers, picked, best,
        s.stride(0), *strides, TILE=TILE,
    )  # fmt: skip
    for array, written in ((row_ptr, pointers), (ids, picked), (out_scores, best)):
        target = to_tensor(array)
        if target.data_ptr() != written.data_ptr():
            target.copy_(written)
    return int(row_ptr[-1])
