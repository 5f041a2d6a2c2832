"""Decode attention over blocks in place and over each row's strip (sinks and recent tokens).

A step has few rows, so that a row's blocks are shared out over programs; each leaves its part and
its log-sum-exp, and a second kernel merges the parts. The strip is a part of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tierstore.kernels.element import Array, to_tensor
from tierstore.kernels.triton.launch import (
    launch,
    narrow,
    padded,
    processors,
    product,
    tensors,
    tile_of,
    tiles,
)

if TYPE_CHECKING:
    from tierstore.kernels.shape import BlockShape

_PART_TOKENS = 64
"""Tokens that are worth a part of their own."""

_PROGRAMS_EACH = 2
"""Programs wanted for each multiprocessor."""


@triton.jit
def fold(q, k, v, live, scale, peak, total, acc):
    """Take a tile of tokens into a running softmax: q [H, d], k [d, T], v [T, e], live [T]."""
    s = product(q, k, tl.zeros((q.shape[0], k.shape[1]), tl.float32)) * scale
    s = tl.where(live[None, :], s, float("-inf"))
    top = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(s - safe[:, None])
    kept = tl.exp(peak - safe)
    acc = acc * kept[:, None]
    total = total * kept + tl.sum(p, 1)
    if v.dtype == tl.float32:
        acc = product(p, v, acc)
    else:
        # One half-precision weight would cost 8 bits or more; its rounding error is a second one.
        rounded = p.to(v.dtype)
        rest = (p - rounded.to(tl.float32)).to(v.dtype)
        acc = product(rounded, v, acc)
        acc = product(rest, v, acc)
    return top, total, acc


@triton.jit
def attend_kernel(query, pool, row_ptr, slots, valid, strip_key, strip_value, strip_length, parts,
                  part_lse, scale, per_part, pool_stride, key_row, key_token, value_row,
                  value_token, GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr,
                  VALUE: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr,
                  KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, token = tl.arange(0, HEADS), tl.arange(0, TILE)
    i, j = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    q = tl.load(
        query + (row * GROUP + head[:, None]) * KEY + i[None, :],
        mask=(head[:, None] < GROUP) & (i[None, :] < KEY),
        other=0.0,
    )
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, VALUE_WIDTH), tl.float32)
    if part == 0:
        n = tl.load(strip_length + row)
        for first in range(0, n, TILE):
            at = (first + token).to(tl.int64)
            live = first + token < n
            k = tl.load(
                strip_key + row * key_row + at[None, :] * key_token + i[:, None],
                mask=live[None, :] & (i[:, None] < KEY),
                other=0.0,
            )
            v = tl.load(
                strip_value + row * value_row + at[:, None] * value_token + j[None, :],
                mask=live[:, None] & (j[None, :] < VALUE),
                other=0.0,
            )
            peak, total, acc = fold(q, k, v, live, scale, peak, total, acc)
    else:
        begin = tl.load(row_ptr + row) + (part - 1) * per_part
        stop = tl.minimum(begin + per_part, tl.load(row_ptr + row + 1))
        n = (stop - begin).to(tl.int32) * TOKENS
        for first in range(0, n, TILE):
            place = begin + (first + token) // TOKENS
            inside = (first + token) % TOKENS
            live = first + token < n
            live = live & (inside < tl.load(valid + place, mask=live, other=0))
            block = tl.load(slots + place, mask=live, other=0).to(tl.int64) * pool_stride
            k = tl.load(
                pool + (block + inside * KEY)[None, :] + i[:, None],
                mask=live[None, :] & (i[:, None] < KEY),
                other=0.0,
            )
            v = tl.load(
                pool + (block + OFFSET + inside * VALUE)[:, None] + j[None, :],
                mask=live[:, None] & (j[None, :] < VALUE),
                other=0.0,
            )
            peak, total, acc = fold(q, k, v, live, scale, peak, total, acc)
    # A part that sees nothing has zeros and no mass; NaN stays NaN.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    place = (row * tl.num_programs(1) + part) * GROUP + head
    tl.store(part_lse + place, peak + tl.log(total), mask=head < GROUP)
    tl.store(
        parts + place[:, None] * VALUE + j[None, :],
        acc,
        mask=(head[:, None] < GROUP) & (j[None, :] < VALUE),
    )


@triton.jit
def merge_kernel(parts, part_lse, out, lse, count, GROUP: tl.constexpr, VALUE: tl.constexpr,
                 VALUE_WIDTH: tl.constexpr, ROOM: tl.constexpr, MERGE: tl.constexpr):  # fmt: skip
    """Attention over all of a row's parts, and over what `out` holds already where merging."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, j = tl.arange(0, ROOM), tl.arange(0, VALUE_WIDTH)
    place = (row * count + part) * GROUP + head
    sums = tl.load(part_lse + place, mask=part < count, other=float("-inf"))
    mine = row * GROUP + head
    peak = tl.max(sums, 0)
    held = tl.full((), float("-inf"), tl.float32)
    if MERGE:
        held = tl.load(lse + mine)
        peak = tl.maximum(peak, held)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(sums - peak)
    total = tl.sum(weight, 0)
    values = tl.load(
        parts + place[:, None] * VALUE + j[None, :],
        mask=(part[:, None] < count) & (j[None, :] < VALUE),
        other=0.0,
    )
    acc = tl.sum(values * weight[:, None], 0)
    if MERGE:
        kept = tl.exp(held - peak)
        total += kept
        acc += tl.load(out + mine * VALUE + j, mask=j < VALUE, other=0.0).to(tl.float32) * kept
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + mine * VALUE + j, narrow(acc, out.dtype.element_ty), mask=j < VALUE)
    tl.store(lse + mine, peak + tl.log(total))


def parts_of(rows: int, blocks: int, tokens: int, programs: int) -> int:
    """Parts that a row's blocks are attended in, so that there are about so many programs.

    rows; blocks of the longest row; tokens of a block. No part has fewer than 64 tokens.
    """
    wanted = tiles(programs, max(rows, 1))
    return max(1, min(wanted, tiles(blocks * tokens, _PART_TOKENS)))


def attend_blocks(
    query: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    slots: Array,
    valid: Array,
    strip_key: Array,
    strip_value: Array,
    strip_length: Array,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool,
) -> None:
    """See `tierstore.kernels.attend_blocks`; `row_ptr` is best on the host."""
    blocks, q, pointers, at, live, key, value, length = tensors(
        pool, query, row_ptr, slots, valid, strip_key, strip_value, strip_length
    )
    rows, group, _ = q.shape
    longest = int((row_ptr[1:] - row_ptr[:-1]).max()) if rows else 0
    programs = processors(blocks.device) * _PROGRAMS_EACH
    split = parts_of(rows, longest, shape.tokens, programs)
    parts = blocks.new_empty((rows, split + 1, group, shape.value_dim), dtype=torch.float32)
    sums = parts.new_empty(parts.shape[:3])
    widths = padded(shape.key_dim), padded(shape.value_dim)
    launch(
        attend_kernel, (rows, split + 1), q.contiguous(), blocks, pointers, at, live, key, value,
        length, parts, sums, scale, tiles(longest, split), blocks.stride(0), key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), GROUP=group, TOKENS=shape.tokens,
        KEY=shape.key_dim, VALUE=shape.value_dim, OFFSET=shape.value_offset, HEADS=padded(group),
        KEY_WIDTH=widths[0], VALUE_WIDTH=widths[1],
        TILE=tile_of(max(widths), blocks.element_size()),
    )  # fmt: skip
    merge_parts(parts, sums, to_tensor(out), to_tensor(lse), merge=merge)


def merge_parts(
    parts: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, merge: bool
) -> None:
    """Attention over the union of disjoint key sets from the attention over each.

    Parameters
    ----------
    parts, sums: float32 [R, S, G, e] attention and [R, S, G] log-sum-exp over each of S sets.
    out, lse: [R, G, e] and float32 [R, G]; what they hold is one more set where `merge`.
    """
    rows, count, group, dim = parts.shape
    launch(
        merge_kernel, (rows, group), parts, sums, out, lse, count, GROUP=group, VALUE=dim,
        VALUE_WIDTH=padded(dim), ROOM=int(triton.next_power_of_2(count)), MERGE=merge,
    )  # fmt: skip
