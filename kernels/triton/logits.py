"""Logits of index units: inner products, and upper bounds over boxes.

Arguments are described once, in `tierstore.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, padded, product, tensors, tile_of, tiles

if TYPE_CHECKING:
    import torch

    from tierstore.kernels.element import Array


@triton.jit
def dot_kernel(query, units, counts, out, scale, row_stride, unit_stride, out_row, out_head,
               GROUP: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, HEADS)
    axis = tl.arange(0, WIDTH)
    is_unit = unit < tl.load(counts + row)
    q = tl.load(
        query + (row * GROUP + head[:, None]) * DIM + axis[None, :],
        mask=(head[:, None] < GROUP) & (axis[None, :] < DIM),
        other=0.0,
    )
    u = tl.load(
        units + row * row_stride + unit[None, :].to(tl.int64) * unit_stride + axis[:, None],
        mask=is_unit[None, :] & (axis[:, None] < DIM),
        other=0.0,
    )
    if q.dtype != u.dtype:
        q, u = q.to(tl.float32), u.to(tl.float32)
    logits = product(q, u, tl.zeros((HEADS, TILE), tl.float32)) * scale
    tl.store(
        out + row * out_row + head[:, None] * out_head + unit[None, :],
        logits,
        mask=(head[:, None] < GROUP) & is_unit[None, :],
    )


@triton.jit
def box_kernel(query, high, low, counts, out, scale, row_stride, unit_stride, out_row, out_head,
               GROUP: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, HEADS)
    axis = tl.arange(0, WIDTH)
    is_unit = unit < tl.load(counts + row)
    q = tl.load(
        query + (row * GROUP + head[:, None]) * DIM + axis[None, :],
        mask=(head[:, None] < GROUP) & (axis[None, :] < DIM),
        other=0.0,
    )
    at = row * row_stride + unit[None, :].to(tl.int64) * unit_stride + axis[:, None]
    inside = is_unit[None, :] & (axis[:, None] < DIM)
    highest = tl.load(high + at, mask=inside, other=0.0)
    lowest = tl.load(low + at, mask=inside, other=0.0)
    if q.dtype != highest.dtype:
        q, highest, lowest = q.to(tl.float32), highest.to(tl.float32), lowest.to(tl.float32)
    # Where q is positive the upper end is the corner that counts, elsewhere the lower one.
    sign, zero = q.to(tl.float32), tl.zeros_like(q)
    logits = product(tl.where(sign > 0, q, zero), highest, tl.zeros((HEADS, TILE), tl.float32))
    logits = product(tl.where(sign < 0, q, zero), lowest, logits)
    tl.store(
        out + row * out_row + head[:, None] * out_head + unit[None, :],
        logits * scale,
        mask=(head[:, None] < GROUP) & is_unit[None, :],
    )


def _tile(query: torch.Tensor, units: torch.Tensor) -> int:
    """Units of a program; both operands are widened to the wider type."""
    return tile_of(padded(query.shape[2]), max(query.element_size(), units.element_size()))


def dot_logits(query: Array, units: Array, counts: Array, scale: float, out: Array) -> None:
    u, q, n, result = tensors(units, query, counts, out)
    rows, group, dim = q.shape
    tile = _tile(q, u)
    launch(
        dot_kernel, (rows, tiles(u.shape[1], tile)), q.contiguous(), u, n, result, scale,
        u.stride(0), u.stride(1), result.stride(0), result.stride(1),
        GROUP=group, DIM=dim, HEADS=padded(group), WIDTH=padded(dim), TILE=tile,
    )  # fmt: skip


def box_logits(
    query: Array, high: Array, low: Array, counts: Array, scale: float, out: Array
) -> None:
    highest, lowest, q, n, result = tensors(high, low, query, counts, out)
    rows, group, dim = q.shape
    tile = _tile(q, highest)
    launch(
        box_kernel, (rows, tiles(highest.shape[1], tile)), q.contiguous(), highest, lowest, n,
        result, scale, highest.stride(0), highest.stride(1), result.stride(0), result.stride(1),
        GROUP=group, DIM=dim, HEADS=padded(group), WIDTH=padded(dim), TILE=tile,
    )  # fmt: skip
