"""Product quantisation: nearest centroid of each sub-vector, and logits from lookup tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, padded, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

TILE = 128
"""Tokens of a program."""


@triton.jit
def encode_kernel(keys, books, codes, n, row_stride, token_stride, PARTS: tl.constexpr,
                  ENTRIES: tl.constexpr, DIM: tl.constexpr, ROOM: tl.constexpr,
                  WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    token, axis = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    entry = tl.arange(0, ROOM)
    x = tl.load(
        keys + row * row_stride + token[:, None].to(tl.int64) * token_stride + part * DIM
        + axis[None, :],
        mask=(token[:, None] < n) & (axis[None, :] < DIM),
        other=0.0,
    ).to(tl.float32)  # fmt: skip
    c = tl.load(
        books + ((row * PARTS + part) * ENTRIES + entry[None, :]) * DIM + axis[:, None],
        mask=(entry[None, :] < ENTRIES) & (axis[:, None] < DIM),
        other=0.0,
    )
    score = tl.dot(x, c, input_precision="ieee") - tl.sum(c * c, 0)[None, :] / 2
    score = tl.where(entry[None, :] < ENTRIES, score, float("-inf"))
    place = (row * n + token) * PARTS + part
    tl.store(codes + place, tl.argmax(score, 1).to(tl.uint8), mask=token < n)


@triton.jit
def scan_kernel(tables, codes, counts, out, row_stride, out_row, out_head, GROUP: tl.constexpr,
                PARTS: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, head = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, HEADS)
    is_token, is_head = token < tl.load(counts + row), head < GROUP
    total = tl.zeros((HEADS, TILE), tl.float32)
    for part in tl.static_range(PARTS):
        at = row * row_stride + token.to(tl.int64) * PARTS + part
        code = tl.load(codes + at, mask=is_token, other=0).to(tl.int32)
        table = tables + ((row * GROUP + head[:, None]) * PARTS + part) * ENTRIES
        total += tl.load(
            table + code[None, :], mask=is_head[:, None] & is_token[None, :], other=0.0
        )
    tl.store(
        out + row * out_row + head[:, None] * out_head + token[None, :],
        total,
        mask=is_head[:, None] & is_token[None, :],
    )


def encode(keys: Array, books: torch.Tensor, codes: Array) -> None:
    """Codes uint8 [R, n, m]: the entry nearest to each of the m equal parts of a key.

    keys: elements [R, n, d]. books: float32 [R, m, c, d / m], c entries for each part.
    """
    k, result = tensors(keys, codes)
    rows, n, _ = k.shape
    _, parts, entries, dim = books.shape
    launch(
        encode_kernel, (rows, tiles(n, TILE), parts), k, books.contiguous(), result, n,
        k.stride(0), k.stride(1), PARTS=parts, ENTRIES=entries, DIM=dim, ROOM=padded(entries),
        WIDTH=padded(dim), TILE=TILE,
    )  # fmt: skip


def tables(query: torch.Tensor, books: torch.Tensor, scale: float) -> torch.Tensor:
    """What every entry adds to a logit, float32 [R, G, m, c]: one small product, left to torch."""
    rows, group, _ = query.shape
    _, parts, _, dim = books.shape
    split = query.float().view(rows, group, parts, dim) * scale
    return torch.einsum("rgmi,rmci->rgmc", split, books).contiguous()


def scan(tables: torch.Tensor, codes: Array, counts: Array, out: Array) -> None:
    """Logits [R, G, n] as sums of what each part's code adds.

    tables: float32 [R, G, m, c]. codes: uint8 [R, n, m]. counts: int32 [R] tokens in use.
    """
    code, n, result = tensors(codes, counts, out)
    rows, group, parts, entries = tables.shape
    launch(
        scan_kernel, (rows, tiles(code.shape[1], TILE)), tables, code, n, result, code.stride(0),
        result.stride(0), result.stride(1), GROUP=group, PARTS=parts, ENTRIES=entries,
        HEADS=int(triton.next_power_of_2(group)), TILE=TILE,
    )  # fmt: skip
