"""How one part of an extent's blocks is stored: as it is, as integers, or as small floats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.kernels import quantise

if TYPE_CHECKING:
    from typing import Any

    from tierstore.interfaces import Bytes
    from tierstore.kernels.element import Array
    from tierstore.kernels.quantise import Grid, Singles

Halves = npt.NDArray[np.float16]

# The smallest normal half: a smaller scale loses digits, and below 3e-8 it would become 0.
SCALE_FLOOR = np.float16(2.0**-14)
# Bit patterns of halves without a sign order as the numbers do.
_FLOOR, _INFINITY = 0x0400, 0x7C00


class Field(ABC):
    """One stored part of the n blocks of an extent. `rows` are those blocks, uint8 [n, bytes].

    halves: numbers of half precision that the extent keeps ahead of the codes.
    code_bytes: bytes of codes in the extent.
    """

    halves: int
    code_bytes: int

    @property
    def nbytes(self) -> int:
        """Stored bytes of the part."""
        return 2 * self.halves + self.code_bytes

    @abstractmethod
    def measure(self, rows: Bytes) -> Halves | None:
        """The part's halves, flat; None if an element cannot be coded (NaN, or too large)."""

    @abstractmethod
    def encode(self, rows: Bytes, halves: Halves, codes: Bytes) -> None:
        """Fill `codes`, flat uint8."""

    @abstractmethod
    def is_sound(self, halves: Halves, codes: Bytes) -> bool:
        """Whether `encode` could have made these."""

    @abstractmethod
    def decode(self, halves: Halves, codes: Bytes, rows: Bytes) -> None:
        """Fill the part's bytes in `rows`."""


class RawField(Field):
    """The part's bytes, block after block."""

    def __init__(self, offset: int, part_bytes: int, blocks: int) -> None:
        self._columns = slice(offset, offset + part_bytes)
        self.halves, self.code_bytes = 0, blocks * part_bytes

    def measure(self, rows: Bytes) -> Halves | None:
        return np.empty(0, np.float16)

    def encode(self, rows: Bytes, halves: Halves, codes: Bytes) -> None:
        codes.reshape(rows.shape[0], -1)[...] = rows[:, self._columns]

    def is_sound(self, halves: Halves, codes: Bytes) -> bool:
        return True

    def decode(self, halves: Halves, codes: Bytes, rows: Bytes) -> None:
        rows[:, self._columns] = codes.reshape(rows.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Elements:
    """Where a part's elements of array type `dtype` stand in a block: bytes from `offset` on."""

    offset: int
    dtype: np.dtype[Any]
    count: int

    def of(self, rows: Bytes) -> tuple[Array, int]:
        """Elements [n, e] and the first of the part; a copy where they cannot be read in place."""
        size = self.dtype.itemsize
        if self.offset % size == 0 and rows.shape[1] % size == 0:
            elements = rows.view(self.dtype)
            if elements.flags.aligned:
                return elements, self.offset // size
        return self._columns(rows).copy().view(self.dtype), 0

    def put(self, elements: Array, rows: Bytes) -> None:
        """Bring what was written to `elements`, which `of` returned, into `rows`."""
        if not np.may_share_memory(elements, rows):
            self._columns(rows)[...] = elements.view(np.uint8)

    def _columns(self, rows: Bytes) -> Bytes:
        return rows[:, self.offset : self.offset + self.count * self.dtype.itemsize]


class IntegerField(Field):
    """Each group between its two ends in steps of 8 or 4 bits: x' = low + code * scale.

    |x - x'| <= scale / 2 and one rounding of x' to the element type. scale is the larger of
    (greatest - low) / (2**bits - 1) and 2**-14; low is the least element. Both are halves, rounded
    so that the group stays covered: low down, scale up, each by at most 2**-10 of itself.
    """

    def __init__(self, elements: Elements, grid: Grid, bits: int) -> None:
        self._elements, self._grid, self._bits = elements, grid, bits
        self._line_bytes = grid.channels if bits == 8 else (grid.channels + 1) // 2
        self.halves = 2 * grid.shape[0] * grid.shape[1]
        self.code_bytes = grid.lines * self._line_bytes

    def measure(self, rows: Bytes) -> Halves | None:
        low, high, peak = quantise.ranges(*self._elements.of(rows), self._grid)
        if not peak <= quantise.LARGEST:
            return None
        low_half = np.float16(0) - _rounded_up(-low)
        top = np.float32((1 << self._bits) - 1)
        scale = _scale((high - low_half.astype(np.float32)) / top)
        return np.concatenate([low_half.reshape(-1), scale.reshape(-1)])

    def encode(self, rows: Bytes, halves: Halves, codes: Bytes) -> None:
        elements, first = self._elements.of(rows)
        low, scale = self._ends(halves)
        lines = codes.reshape(self._grid.lines, self._line_bytes)
        quantise.encode_integers(elements, first, self._grid, low, scale, self._bits, lines)

    def is_sound(self, halves: Halves, codes: Bytes) -> bool:
        low, scale = halves[: self.halves // 2], halves[self.halves // 2 :]
        return bool((low.view(np.uint16) & 0x7FFF).max() < _INFINITY) and _are_scales(scale)

    def decode(self, halves: Halves, codes: Bytes, rows: Bytes) -> None:
        elements, first = self._elements.of(rows)
        low, scale = self._ends(halves)
        lines = codes.reshape(self._grid.lines, self._line_bytes)
        quantise.decode_integers(lines, low, scale, self._bits, self._grid, elements, first)
        self._elements.put(elements, rows)

    def _ends(self, halves: Halves) -> tuple[Singles, Singles]:
        low, scale = halves.astype(np.float32).reshape(2, *self._grid.shape)
        return low, scale


class FloatField(Field):
    """Each group as e4m3 numbers times one scale: x' = e4m3(x / scale) * scale.

    |x - x'| <= max(|x| / 16, scale / 1024) and one rounding of x' to the element type. scale is the
    larger of the greatest magnitude / 448 and 2**-14, a half, rounded up by at most 2**-10 of it.
    """

    def __init__(self, elements: Elements, grid: Grid) -> None:
        self._elements, self._grid = elements, grid
        self.halves = grid.shape[0] * grid.shape[1]
        self.code_bytes = grid.lines * grid.channels

    def measure(self, rows: Bytes) -> Halves | None:
        low, high, peak = quantise.ranges(*self._elements.of(rows), self._grid)
        if not peak <= quantise.LARGEST:
            return None
        largest: Singles = np.maximum(-low, high)
        return _scale(largest / quantise.FLOAT_TOP).reshape(-1)

    def encode(self, rows: Bytes, halves: Halves, codes: Bytes) -> None:
        elements, first = self._elements.of(rows)
        lines = codes.reshape(self._grid.lines, self._grid.channels)
        quantise.encode_floats(elements, first, self._grid, self._scales(halves), lines)

    def is_sound(self, halves: Halves, codes: Bytes) -> bool:
        return _are_scales(halves) and bool((codes & 0x7F).max() < 0x7F)

    def decode(self, halves: Halves, codes: Bytes, rows: Bytes) -> None:
        elements, first = self._elements.of(rows)
        lines = codes.reshape(self._grid.lines, self._grid.channels)
        quantise.decode_floats(lines, self._scales(halves), self._grid, elements, first)
        self._elements.put(elements, rows)

    def _scales(self, halves: Halves) -> Singles:
        return halves.astype(np.float32).reshape(self._grid.shape)


def _rounded_up(values: Singles) -> Halves:
    """The smallest half that is not below each value."""
    halves = values.astype(np.float16)
    below = halves.astype(np.float32) < values
    halves[below] = np.nextafter(halves[below], np.float16(np.inf))
    return halves


def _scale(values: Singles) -> Halves:
    return np.maximum(_rounded_up(values), SCALE_FLOOR)


def _are_scales(scale: Halves) -> bool:
    bits = scale.view(np.uint16)
    return bool(bits.min() >= _FLOOR and bits.max() < _INFINITY)
