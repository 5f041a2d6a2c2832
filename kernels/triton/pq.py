"""Product quantisation: codes packed into words, and logits from lookup tables.

Codes are laid out as on a CPU, bit by bit, so that an index's state moves between devices; a code
takes no more bytes than it has bits. Arguments are described once, in `tierstore.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tierstore.kernels import reference
from tierstore.kernels.triton.launch import launch, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

LANES = 64
"""Tokens whose codes are stored together, a word for each bit of them; those of a program."""


@triton.jit
def pack_kernel(codes, packed, first, n, row_stride, BITS: tl.constexpr, ROOM: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    """The words of one part in one group, of which some lanes may have older tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    parts = tl.num_programs(2)
    group = first // LANES + tl.program_id(1)
    lane, bit = tl.arange(0, LANES), tl.arange(0, ROOM)
    token = group * LANES + lane - first
    is_new = (token >= 0) & (token < n)
    code = tl.load(codes + (row * n + token) * parts + part, mask=is_new, other=0).to(tl.int64)
    one = tl.full((LANES,), 1, tl.int64)
    new = tl.sum(tl.where(is_new, one << lane, 0), 0)
    words = tl.sum(((code[None, :] >> bit[:, None]) & 1) << lane[None, :], 1)
    place = packed + row * row_stride + (group * parts + part) * BITS + bit
    last = tl.load(place, mask=bit < BITS, other=0)
    tl.store(place, (last & ~new) | words, mask=bit < BITS)


@triton.jit
def scan_kernel(tables, packed, counts, out, row_stride, out_row, out_head, GROUP: tl.constexpr,
                PARTS: tl.constexpr, BITS: tl.constexpr, HEADS: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, head = tl.arange(0, LANES), tl.arange(0, HEADS)
    token = group * LANES + lane
    live = (head[:, None] < GROUP) & (token[None, :] < tl.load(counts + row))
    words = packed + row * row_stride + group * PARTS * BITS
    total = tl.zeros((HEADS, LANES), tl.float32)
    for part in range(PARTS):
        code = tl.zeros((LANES,), tl.int32)
        for bit in tl.static_range(BITS):
            word = tl.load(words + part * BITS + bit)
            code |= ((word >> lane) & 1).to(tl.int32) << bit
        table = tables + (((row * GROUP + head[:, None]) * PARTS + part) << BITS)
        total += tl.load(table + code[None, :], mask=live, other=0.0)
    tl.store(out + row * out_row + head[:, None] * out_head + token[None, :], total, mask=live)


def pack_codes(codes: Array, first: int, packed: Array) -> None:
    words, new = tensors(packed, codes)
    rows, n, parts = new.shape
    bits = words.shape[3]
    groups = tiles(first + n, LANES) - first // LANES if n else 0
    launch(
        pack_kernel, (rows, groups, parts), new.contiguous(), words, first, n,
        words.stride(0), BITS=bits, ROOM=int(triton.next_power_of_2(bits)), LANES=LANES,
    )  # fmt: skip


def pq_logits(
    query: Array, codewords: Array, codes: Array, counts: Array, scale: float, out: Array
) -> None:
    packed, q, words, n, result = tensors(codes, query, codewords, counts, out)
    rows, groups, parts, bits = packed.shape
    heads = q.shape[1]
    # One small product, left to torch.
    tables = reference.lookup_tables(q, words, scale).contiguous()
    launch(
        scan_kernel, (rows, groups), tables, packed, n, result, packed.stride(0), result.stride(0),
        result.stride(1), GROUP=heads, PARTS=parts, BITS=bits,
        HEADS=int(triton.next_power_of_2(heads)), LANES=LANES,
    )  # fmt: skip
