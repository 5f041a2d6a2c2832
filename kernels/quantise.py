"""Quantising elements in groups: to 8 or 4 bits between two ends, or to e4m3 with a scale.

`rows` are elements [n, e] (`tierstore.kernels.element`), C-contiguous, one block a row; the part
stands from element `first` on, token after token. Where Numba is missing, NumPy gives the same
codes, slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierstore.kernels.element import Array, to_tensor

try:
    from tierstore.kernels.cpu import quantise as cpu
except ImportError:  # Numba has no build for every Python.
    cpu = None  # type: ignore[assignment]

Singles = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

LARGEST = np.float32(65504.0)
"""Largest magnitude that can be quantised: ends and scales are kept in half precision."""

FLOAT_TOP = np.float32(448.0)
"""Largest e4m3 number."""

_SIGNLESS = np.int32(0x7FFFFFFF)


def _e4m3() -> Singles:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


FLOATS = _e4m3()
"""The number of every e4m3 code, float32 [256]; two codes are NaN."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Groups of `token_group` tokens by `channel_group` channels over one part of an extent.

    The last group of tokens takes those left over, so that none is smaller than `token_group`
    unless the extent is; the last group of channels is what remains. tokens: per block.
    """

    blocks: int
    tokens: int
    channels: int
    token_group: int
    channel_group: int

    @property
    def lines(self) -> int:
        """Tokens in the extent."""
        return self.blocks * self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Groups of tokens, and of channels."""
        return max(self.lines // self.token_group, 1), -(-self.channels // self.channel_group)


def uses_numba() -> bool:
    """Whether compiled kernels serve; NumPy does otherwise."""
    return cpu is not None


def ranges(rows: Array, first: int, grid: Grid) -> tuple[Singles, Singles, float]:
    """Least and greatest element of each group [groups, groups], and the largest magnitude.

    The magnitude is NaN if an element is; least and greatest mean nothing then.
    """
    if not uses_numba():
        return _ranges(_elements(rows, first, grid), grid)
    low, high = np.empty(grid.shape, np.int32), np.empty(grid.shape, np.int32)
    peak = cpu.ranges(rows, first, grid.tokens, grid.channels, grid.token_group,
                      grid.channel_group, low, high)  # fmt: skip
    return _in_order(low), _in_order(high), float(np.int32(peak).view(np.float32))


def encode_integers(
    rows: Array, first: int, grid: Grid, low: Singles, scale: Singles, bits: int, codes: Codes
) -> None:
    """Codes uint8 [lines, bytes] of ``(x - low) / scale``, rounded; `bits` 8 or 4.

    With 4 bits, byte j of a token holds channel j below and channel ``ceil(channels / 2) + j``
    above. Requires: low and scale float32 of the grid's shape, scale > 0, low at most the least.
    """
    if not uses_numba():
        _encode_integers(_elements(rows, first, grid), grid, low, scale, bits, codes)
        return
    cpu.encode_integers(rows, first, grid.tokens, grid.channels, grid.token_group,
                        grid.channel_group, low, scale, bits, codes)  # fmt: skip


def decode_integers(
    codes: Codes, low: Singles, scale: Singles, bits: int, grid: Grid, rows: Array, first: int
) -> None:
    """Put ``low + code * scale`` into the part's elements, no larger than `LARGEST`."""
    if not uses_numba():
        steps = _unpacked(codes, grid.channels) if bits == 4 else codes
        values = _spread(low, grid) + steps.astype(np.float32) * _spread(scale, grid)
        _put(values, rows, first, grid)
        return
    cpu.decode_integers(codes, low, scale, bits, grid.tokens, grid.channels, grid.token_group,
                        grid.channel_group, rows, first)  # fmt: skip


def encode_floats(rows: Array, first: int, grid: Grid, scale: Singles, codes: Codes) -> None:
    """Codes uint8 [lines, channels] of ``x / scale`` rounded to even in e4m3, at most its top."""
    if not uses_numba():
        scaled = torch.from_numpy(_elements(rows, first, grid) / _spread(scale, grid))
        clipped = scaled.clamp(-float(FLOAT_TOP), float(FLOAT_TOP))
        codes[...] = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return
    cpu.encode_floats(rows, first, grid.tokens, grid.channels, grid.token_group,
                      grid.channel_group, scale, codes)  # fmt: skip


def decode_floats(codes: Codes, scale: Singles, grid: Grid, rows: Array, first: int) -> None:
    """Put the e4m3 number of each code times its scale into the part's elements."""
    if not uses_numba():
        _put(FLOATS[codes] * _spread(scale, grid), rows, first, grid)
        return
    cpu.decode_floats(codes, scale, FLOATS, grid.tokens, grid.channels, grid.token_group,
                      grid.channel_group, rows, first)  # fmt: skip


def _in_order(ordered: npt.NDArray[np.int32]) -> Singles:
    """The floats whose ordered integers these are."""
    return (ordered ^ ((ordered >> np.int32(31)) & _SIGNLESS)).view(np.float32)


def _elements(rows: Array, first: int, grid: Grid) -> Singles:
    part = rows[:, first : first + grid.tokens * grid.channels].copy()
    values: Singles = to_tensor(part).float().numpy().reshape(grid.lines, grid.channels)
    return values


def _put(values: Singles, rows: Array, first: int, grid: Grid) -> None:
    part = np.empty((grid.blocks, grid.tokens * grid.channels), rows.dtype)
    clipped = np.clip(values, -LARGEST, LARGEST).reshape(part.shape)
    to_tensor(part).copy_(torch.from_numpy(clipped))
    rows[:, first : first + part.shape[1]] = part


def _spread(values: Singles, grid: Grid) -> Singles:
    """The value of each element's group, [lines, channels]."""
    group = np.minimum(np.arange(grid.lines) // grid.token_group, grid.shape[0] - 1)
    return values[group][:, np.arange(grid.channels) // grid.channel_group]


def _ranges(values: Singles, grid: Grid) -> tuple[Singles, Singles, float]:
    tokens = np.arange(grid.shape[0]) * grid.token_group
    channels = np.arange(grid.shape[1]) * grid.channel_group
    low, high = (
        edge.reduceat(edge.reduceat(values, tokens, axis=0), channels, axis=1)
        for edge in (np.minimum, np.maximum)
    )
    return low, high, float(np.abs(values).max())


def _encode_integers(
    values: Singles, grid: Grid, low: Singles, scale: Singles, bits: int, codes: Codes
) -> None:
    level = (values - _spread(low, grid)) / _spread(scale, grid) + np.float32(0.5)
    steps = np.minimum(level, np.float32((1 << bits) - 1)).astype(np.uint8)
    if bits == 8:
        codes[...] = steps
        return
    half = codes.shape[1]
    codes[...] = steps[:, :half]
    codes[:, : grid.channels - half] |= steps[:, half:] << np.uint8(4)


def _unpacked(codes: Codes, channels: int) -> Codes:
    """Two codes of 4 bits from each byte, [lines, channels]."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], 1)[:, :channels]
