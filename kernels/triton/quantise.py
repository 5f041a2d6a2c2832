"""Quantising elements in groups, on the device: the codes are those of the CPU, byte for byte.

Arguments are described once, in `tierstore.kernels.quantise`; here they live on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, narrow, tensors, tiles

if TYPE_CHECKING:
    from tierstore.kernels.element import Array
    from tierstore.kernels.quantise import Grid

LINES = 16
"""Tokens of a tile."""

_MAGNITUDE = 0x7FFFFFFF


@triton.jit
def element(rows, row_stride, first, line, channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Where the elements of lines and channels are."""
    block = (line // TOKENS).to(tl.int64) * row_stride
    return rows + block + first + (line % TOKENS) * CHANNELS + channel


@triton.jit
def ordered(x):
    """Signed integers in the order of floats, in which NaN is beyond either end; its own inverse.

    Comparisons of floats would let a NaN vanish.
    """
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def ranges_kernel(rows, low, high, row_stride, first, lines, token_group, groups,
                  TOKENS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
                  LINES: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """One group of tokens, and of channels; where each channel is a group, a tile of channels."""
    g, w = tl.program_id(0), tl.program_id(1)
    step: tl.constexpr = ROOM if GROUP == 1 else GROUP
    channel = w * step + tl.arange(0, ROOM)
    is_channel = (channel < CHANNELS) & (tl.arange(0, ROOM) < step)
    stop = tl.where(g == groups - 1, lines, (g + 1) * token_group)
    least = tl.full((LINES, ROOM), 0x7FFFFFFF, tl.int32)
    most = tl.full((LINES, ROOM), -0x7FFFFFFF - 1, tl.int32)
    for begin in range(g * token_group, stop, LINES):
        line = begin + tl.arange(0, LINES)
        inside = (line[:, None] < stop) & is_channel[None, :]
        at = element(rows, row_stride, first, line[:, None], channel[None, :], TOKENS, CHANNELS)
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        key = ordered(x.to(tl.int32, bitcast=True))
        least = tl.minimum(least, tl.where(inside, key, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(inside, key, -0x7FFFFFFF - 1))
    if GROUP == 1:
        tl.store(low + g * CHANNELS + channel, ordered(tl.min(least, 0)), mask=is_channel)
        tl.store(high + g * CHANNELS + channel, ordered(tl.max(most, 0)), mask=is_channel)
    else:
        place = g * tl.num_programs(1) + w
        tl.store(low + place, ordered(tl.min(tl.min(least, 0), 0)))
        tl.store(high + place, ordered(tl.max(tl.max(most, 0), 0)))


@triton.jit
def codes_of(rows, low, scale, row_stride, first, line, channel, inside, group, wide,
             BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
             GROUP: tl.constexpr):  # fmt: skip
    """Codes of elements [L, C], 0 outside."""
    at = element(rows, row_stride, first, line[:, None], channel[None, :], TOKENS, CHANNELS)
    own = group[:, None] * wide + (channel // GROUP)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(low + own, mask=inside, other=0.0)
    step = tl.load(scale + own, mask=inside, other=1.0)
    level = tl.div_rn(x - zero, step) + 0.5
    top: tl.constexpr = (1 << BITS) - 1
    code = tl.minimum(level, top * 1.0).to(tl.int32)
    return tl.where(inside, code, 0)


@triton.jit
def encode_kernel(rows, low, scale, codes, row_stride, first, lines, token_group, groups, wide,
                  BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
                  GROUP: tl.constexpr, BYTES: tl.constexpr, LINES: tl.constexpr,
                  ROOM: tl.constexpr):  # fmt: skip
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    channel = tl.arange(0, ROOM)
    group = tl.minimum(line // token_group, groups - 1)
    is_byte = (line[:, None] < lines) & (channel[None, :] < BYTES)
    code = codes_of(rows, low, scale, row_stride, first, line, channel, is_byte, group, wide,
                    BITS, TOKENS, CHANNELS, GROUP)  # fmt: skip
    if BITS == 4:
        above = channel + BYTES
        inside = is_byte & (above[None, :] < CHANNELS)
        code |= codes_of(rows, low, scale, row_stride, first, line, above, inside, group, wide,
                         BITS, TOKENS, CHANNELS, GROUP) << 4  # fmt: skip
    place = line[:, None].to(tl.int64) * BYTES + channel[None, :]
    tl.store(codes + place, code.to(tl.uint8), mask=is_byte)


@triton.jit
def decode_kernel(rows, low, scale, codes, row_stride, first, lines, token_group, groups, wide,
                  BITS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
                  GROUP: tl.constexpr, BYTES: tl.constexpr, LINES: tl.constexpr,
                  ROOM: tl.constexpr):  # fmt: skip
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    channel = tl.arange(0, ROOM)
    group = tl.minimum(line // token_group, groups - 1)
    inside = (line[:, None] < lines) & (channel[None, :] < CHANNELS)
    is_above = channel >= BYTES
    byte = tl.where(is_above, channel - BYTES, channel)
    code = tl.load(
        codes + line[:, None].to(tl.int64) * BYTES + byte[None, :], mask=inside, other=0
    ).to(tl.int32)
    if BITS == 4:
        code = tl.where(is_above[None, :], code >> 4, code & 15)
    own = group[:, None] * wide + (channel // GROUP)[None, :]
    zero = tl.load(low + own, mask=inside, other=0.0)
    step = tl.load(scale + own, mask=inside, other=0.0)
    x = zero + code.to(tl.float32) * step
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    at = element(rows, row_stride, first, line[:, None], channel[None, :], TOKENS, CHANNELS)
    tl.store(at, narrow(x, rows.dtype.element_ty), mask=inside)


def ranges(rows: Array, first: int, grid: Grid, low: Array, high: Array) -> float:
    """Fill the least and greatest of each group, float32; returns the largest magnitude or NaN."""
    x, least, most = tensors(rows, low, high)
    alone = grid.channel_group == 1
    room = 128 if alone else int(triton.next_power_of_2(grid.channel_group))
    launch(
        ranges_kernel, (grid.shape[0], tiles(grid.channels, room) if alone else grid.shape[1]),
        x, least.view(torch.int32), most.view(torch.int32), x.stride(0), first, grid.lines,
        grid.token_group, grid.shape[0], TOKENS=grid.tokens, CHANNELS=grid.channels,
        GROUP=grid.channel_group, LINES=LINES, ROOM=room,
    )  # fmt: skip
    ends = torch.stack([least, most]).view(torch.int32) & _MAGNITUDE
    return float(ends.max().view(torch.float32))


def encode_integers(
    rows: Array, first: int, grid: Grid, low: Array, scale: Array, bits: int, codes: Array
) -> None:
    x, zero, step, out = tensors(rows, low, scale, codes)
    launch(
        encode_kernel, (tiles(grid.lines, LINES),), x, zero, step, out, x.stride(0), first,
        grid.lines, grid.token_group, *grid.shape, BITS=bits, TOKENS=grid.tokens,
        CHANNELS=grid.channels, GROUP=grid.channel_group, BYTES=out.shape[1], LINES=LINES,
        ROOM=int(triton.next_power_of_2(out.shape[1])),
    )  # fmt: skip


def decode_integers(
    codes: Array, low: Array, scale: Array, bits: int, grid: Grid, rows: Array, first: int
) -> None:
    x, zero, step, code = tensors(rows, low, scale, codes)
    launch(
        decode_kernel, (tiles(grid.lines, LINES),), x, zero, step, code, x.stride(0), first,
        grid.lines, grid.token_group, *grid.shape, BITS=bits, TOKENS=grid.tokens,
        CHANNELS=grid.channels, GROUP=grid.channel_group, BYTES=code.shape[1], LINES=LINES,
        ROOM=int(triton.next_power_of_2(grid.channels)),
    )  # fmt: skip
