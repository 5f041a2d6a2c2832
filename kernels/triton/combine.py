"""From the logits of units to scores: over the heads of a row, then over the pages of a block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tierstore.kernels import reference
from tierstore.kernels.triton.launch import launch, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

TILE = 1024
"""Units or pages of a tile."""


@triton.jit
def normaliser_kernel(logits, counts, sizes, norms, unit_tokens, row_stride, head_stride,
                      size_stride, SIZED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The log of all mass of each head: one program goes over a head's units."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.load(counts + row)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, n, TILE):
        unit = first + tl.arange(0, TILE)
        inside = unit < n
        s = tl.load(logits + row * row_stride + head * head_stride + unit, mask=inside, other=0.0)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if SIZED:
            weight = tl.load(sizes + row * size_stride + unit, mask=inside, other=0.0)
        s = tl.where(inside & (weight > 0), s, float("-inf"))
        top = tl.maximum(peak, s)
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(peak - safe) + tl.where(weight > 0, weight, 0.0) * tl.exp(s - safe)
        peak = top
    highest = tl.max(peak, 0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    mass = tl.sum(total * tl.exp(peak - safe), 0)
    if not SIZED:
        mass = mass * unit_tokens
    tl.store(norms + row * tl.num_programs(1) + head, safe + tl.log(mass))


@triton.jit
def combine_kernel(logits, counts, sizes, norms, out, log_group, row_stride, head_stride,
                   size_stride, out_stride, GROUP: tl.constexpr, HEADS: tl.constexpr,
                   AGGREGATE: tl.constexpr, SOFTMAX: tl.constexpr, SIZED: tl.constexpr,
                   TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, HEADS)
    n = tl.load(counts + row)
    is_head, is_unit = head[:, None] < GROUP, unit[None, :] < n
    s = tl.load(
        logits + row * row_stride + head[:, None] * head_stride + unit[None, :],
        mask=is_head & is_unit,
        other=0.0,
    )
    if SOFTMAX:
        s -= tl.load(norms + row * GROUP + head, mask=head < GROUP, other=0.0)[:, None]
    if AGGREGATE == "max" or SOFTMAX:
        best = tl.max(tl.where(is_head, s, float("-inf")), 0)
        if AGGREGATE != "max":
            # Where each head says -inf, the difference of two would be NaN.
            safe = tl.where(best == float("-inf"), 0.0, best)
            best = safe + tl.log(tl.sum(tl.where(is_head, tl.exp(s - safe[None, :]), 0.0), 0))
    else:
        best = tl.sum(tl.where(is_head, s, 0.0), 0)
    if AGGREGATE == "mean_group":
        best = best - log_group if SOFTMAX else best / GROUP
    if SIZED:
        size = tl.load(sizes + row * size_stride + unit, mask=unit < n, other=0.0)
        best = tl.where(size > 0, best, float("-inf"))
    tl.store(out + row * out_stride + unit, best, mask=unit < n)


@triton.jit
def pool_kernel(scores, unit_of, blocks, out, score_stride, of_stride, out_stride,
                PAGES: tl.constexpr, ROOM: tl.constexpr, COARSE: tl.constexpr,
                SOFTMAX: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    page = tl.arange(0, ROOM)
    is_block = block < tl.load(blocks + row)
    inside = is_block[:, None] & (page[None, :] < PAGES)
    unit = block[:, None] * PAGES + page[None, :]
    if COARSE:
        unit = tl.load(unit_of + row * of_stride + unit, mask=inside, other=0)
    s = tl.load(scores + row * score_stride + unit, mask=inside, other=float("-inf"))
    best = tl.max(s, 1)
    if SOFTMAX:
        safe = tl.where(best == float("-inf"), 0.0, best)
        best = safe + tl.log(tl.sum(tl.exp(s - safe[:, None]), 1))
    tl.store(out + row * out_stride + block, best, mask=is_block)


@triton.jit
def keep_kernel(kept, blocks, out, kept_stride, out_stride, TILE: tl.constexpr):
    """Lift what is kept above the best of its row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(blocks + row)
    top = tl.full((TILE,), -3e38, tl.float32)
    for first in range(0, n, TILE):
        block = first + tl.arange(0, TILE)
        s = tl.load(out + row * out_stride + block, mask=block < n, other=float("-inf"))
        top = tl.maximum(top, s)
    above = tl.max(top, 0) + 1
    for first in range(0, n, TILE):
        block = first + tl.arange(0, TILE)
        is_kept = tl.load(kept + row * kept_stride + block, mask=block < n, other=0) != 0
        tl.store(out + row * out_stride + block, above, mask=is_kept)


def combine_heads(
    logits: Array,
    counts: Array,
    sizes: Array | None,
    unit_tokens: float,
    beside: Array | None,
    aggregate: str,
    softmax: bool,
    heads: int,
    out: Array,
) -> None:
    raw, n, result = tensors(logits, counts, out)
    size = raw if sizes is None else tensors(logits, sizes)[1]
    rows, group, width = raw.shape
    if aggregate == "per_query":
        _rank_heads(raw, n, None if sizes is None else size, result)
        return
    norms = raw.new_empty((rows, group))
    if softmax:
        launch(
            normaliser_kernel, (rows, group), raw, n, size, norms, unit_tokens, raw.stride(0),
            raw.stride(1), size.stride(0), SIZED=sizes is not None, TILE=TILE,
        )  # fmt: skip
    if softmax and beside is not None:
        norms = torch.logaddexp(norms, tensors(logits, beside)[1])
    launch(
        combine_kernel, (rows, tiles(width, TILE)), raw, n, size, norms, result,
        math.log(group), raw.stride(0), raw.stride(1), size.stride(0), result.stride(0),
        GROUP=group, HEADS=int(triton.next_power_of_2(group)),
        AGGREGATE="mean_group" if aggregate == "mean_all" else aggregate,
        SOFTMAX=softmax, SIZED=sizes is not None, TILE=TILE,
    )  # fmt: skip
    if aggregate == "mean_all" and heads > 1:
        reference.mean_over_rows(out, softmax, heads)


def _rank_heads(
    raw: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Scores by the best rank that any head gives a unit; torch sorts better than Triton."""
    inside = torch.arange(raw.shape[2], device=raw.device) < counts[:, None]
    live = inside if sizes is None else inside & (sizes > 0)
    order = raw.masked_fill(~live[:, None], -math.inf).sort(descending=True, stable=True).indices
    best = order.argsort(-1).amin(1)
    out.copy_(torch.where(inside, (-best.float().log1p()).masked_fill(~live, -math.inf), out))


def pool_pages(
    scores: Array,
    unit_of: Array | None,
    kept: Array | None,
    blocks: Array,
    pages_per_block: int,
    softmax: bool,
    out: Array,
) -> None:
    own, n, result = tensors(scores, blocks, out)
    of = n[:, None] if unit_of is None else tensors(scores, unit_of)[1]
    room = int(triton.next_power_of_2(pages_per_block))
    tile = max(1, TILE // room)
    launch(
        pool_kernel, (len(n), tiles(result.shape[1], tile)), own, of, n, result, own.stride(0),
        of.stride(0), result.stride(0), PAGES=pages_per_block, ROOM=room,
        COARSE=unit_of is not None, SOFTMAX=softmax and pages_per_block > 1, TILE=tile,
    )  # fmt: skip
    if kept is not None:
        keep = tensors(scores, kept.view("uint8"))[1]
        launch(keep_kernel, (len(n),), keep, n, result, keep.stride(0), result.stride(0), TILE=TILE)
