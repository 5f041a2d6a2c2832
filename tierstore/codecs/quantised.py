"""Lossy codecs for keys and values: fewer bits per element, the error bounded per group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tierstore.codecs.fields import Elements, Field, FloatField, Halves, IntegerField, RawField
from tierstore.errors import ConfigError, CorruptBlockError
from tierstore.identity import fitting
from tierstore.interfaces import Codec
from tierstore.kernels.element import SUPPORTED, stored_dtype
from tierstore.kernels.quantise import Grid

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes
    from tierstore.layout import BlockLayout, Part

RAW = 0
WHOLE_TOKEN = 1
KEY_TOKENS = 32
"""Tokens in a group of 4-bit keys: fewer cost more in scales than they save."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How the elements of a part are coded. bits: 8 or 4 for integers, None for e4m3.

    token_group: tokens with common ends, None for all of the extent.
    """

    bits: int | None
    token_group: int | None


class QuantisedCodec(Codec):
    """Codes part ``k`` per channel over tokens, other float parts per token, the rest as they are.

    Stored: one byte 0 and the blocks as they are, if an element is NaN, infinite or beyond 65504
    in magnitude, or if codes would not be shorter. Else one byte, the channels in a group of values
    (1: all of them); then the ends and scales of all parts, each in the order of the layout, little
    endian halves; then the codes of all parts.

    Blocks are whole blocks of the layout, one or more in a row of the array. Token places that hold
    no token count like others: let them hold zeros.
    """

    is_lossless = False
    keys: ClassVar[Coding]
    values: ClassVar[Coding]

    def __init__(self, layout: BlockLayout, value_group: int = WHOLE_TOKEN) -> None:
        self._layout, self._value_group = layout, value_group
        self._fields = lru_cache(maxsize=16)(self._make_fields)  # Extents have few sizes.
        self.unit_bytes = layout.block_bytes

    @property
    def signature(self) -> str:
        return fitting(f"{self.name}/{self._value_group};{self._layout.signature}")

    def encode(self, blocks: Bytes) -> Bytes:
        rows = self._rows(blocks)
        fields = self._fields(rows.shape[0], self._value_group)
        measured = _measured(fields, rows)
        if not measured:
            return np.concatenate([np.array([RAW], np.uint8), rows.reshape(-1)])
        stored = np.empty(1 + sum(field.nbytes for field in fields), np.uint8)
        stored[0] = self._value_group
        head = np.concatenate(measured).astype("<f2", copy=False).view(np.uint8)
        stored[1 : 1 + head.nbytes] = head
        at = 1 + head.nbytes
        for field, halves in zip(fields, measured, strict=True):
            field.encode(rows, halves, stored[at : at + field.code_bytes])
            at += field.code_bytes
        return stored

    def decode(self, stored: Bytes, out: Bytes) -> None:
        blocks = self._blocks_in(out)
        mark = int(stored[0]) if stored.size else None
        if mark == RAW:
            self._expect(stored, 1 + out.nbytes)
            out[...] = stored[1:].reshape(out.shape)
            return
        if mark is None or mark not in self._marks():
            raise CorruptBlockError(
                f"{self.name} extent begins with {mark}: expected one of {[RAW, *self._marks()]}"
            )
        fields = self._fields(blocks, mark)
        if not fields:
            raise CorruptBlockError(
                f"{self.name} extent of {out.nbytes} bytes begins with {mark}: expected {RAW},"
                " since codes would not be shorter"
            )
        self._expect(stored, 1 + sum(field.nbytes for field in fields))
        pieces = _pieces(fields, stored)
        if not all(field.is_sound(*piece) for field, piece in zip(fields, pieces, strict=True)):
            raise CorruptBlockError(f"{self.name} extent holds scales or codes that none is given")
        place = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        rows = place.reshape(blocks, self.unit_bytes)
        for field, (halves, codes) in zip(fields, pieces, strict=True):
            field.decode(halves, codes, rows)
        if place is not out:
            out[...] = place

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    @classmethod
    def _marks(cls) -> tuple[int, ...]:
        return (WHOLE_TOKEN,)

    def _expect(self, stored: Bytes, nbytes: int) -> None:
        if stored.nbytes != nbytes:
            raise CorruptBlockError(
                f"{self.name} extent has {stored.nbytes} bytes: expected {nbytes}"
            )

    def _blocks_in(self, blocks: Bytes) -> int:
        """Blocks of the layout in the array; ConfigError if they are not whole."""
        if blocks.ndim != 2 or blocks.shape[1] % self.unit_bytes:
            raise ConfigError(
                f"blocks of shape {blocks.shape} in codec {self.name!r}: expected [n, a multiple of"
                f" {self.unit_bytes}], whole blocks of its layout; store other values with 'raw'"
            )
        return blocks.nbytes // self.unit_bytes

    def _rows(self, blocks: Bytes) -> Bytes:
        """The blocks one a row, contiguous and writable: kernels compile for one kind of array."""
        rows = np.ascontiguousarray(blocks).reshape(self._blocks_in(blocks), self.unit_bytes)
        return rows if rows.flags.writeable else rows.copy()

    def _make_fields(self, blocks: int, mark: int) -> list[Field]:
        """How each stored part of so many blocks is coded; empty if that would not be shorter."""
        stored = [part for part in self._layout.parts if part.is_stored]
        fields = [self._field(part, blocks, mark) for part in stored]
        is_shorter = sum(field.nbytes for field in fields) < blocks * self.unit_bytes
        return fields if is_shorter else []

    def _field(self, part: Part, blocks: int, mark: int) -> Field:
        offset = self._layout.offset(part.name)
        raw = RawField(offset, part.nbytes, blocks)
        if part.dtype not in SUPPORTED:
            return raw
        channels, is_key = math.prod(part.shape[1:]), part.name == "k"
        coding = self.keys if is_key else self.values
        token_group = coding.token_group or max(blocks * self._layout.tokens, 1)
        channel_group = 1 if is_key else channels if mark == WHOLE_TOKEN else mark
        grid = Grid(blocks, self._layout.tokens, channels, token_group, channel_group)
        elements = Elements(offset, stored_dtype(part.dtype), math.prod(part.shape))
        coded: Field = (
            FloatField(elements, grid)
            if coding.bits is None
            else IntegerField(elements, grid, coding.bits)
        )
        return coded if coded.nbytes < raw.nbytes else raw


class Int8Codec(QuantisedCodec):
    """8 bits: keys per channel over the extent, values per token.

    |x - x'| <= scale / 2, scale = range / 255 of the group, at least 2**-14 (`IntegerField` says
    how ends and scales are rounded).
    """

    name = "int8"
    code = 2
    keys = Coding(8, None)
    values = Coding(8, 1)

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)


class _GroupedCodec(QuantisedCodec):
    """Values in groups of 32 or 64 channels of a token; readable whichever it was."""

    def __init__(self, layout: BlockLayout, value_group: int = 32) -> None:
        if value_group not in self._marks():
            raise ConfigError(
                f"value_group={value_group!r} in codec {self.name!r}: expected one of"
                f" {list(self._marks())} channels"
            )
        super().__init__(layout, value_group)

    @classmethod
    def _marks(cls) -> tuple[int, ...]:
        return (32, 64)


class Int4Codec(_GroupedCodec):
    """4 bits: keys per channel over 32 tokens, values per token over 32 or 64 channels.

    |x - x'| <= scale / 2, scale = range / 15 of the group, at least 2**-14. The last group of keys
    has up to 63 tokens; an extent of fewer than 32 tokens is one group.
    """

    name = "int4"
    code = 3
    keys = Coding(4, KEY_TOKENS)
    values = Coding(4, 1)


class K8V4Codec(_GroupedCodec):
    """Keys as in `Int8Codec`, values as in `Int4Codec`: errors of keys cost far more."""

    name = "k8v4"
    code = 4
    keys = Coding(8, None)
    values = Coding(4, 1)


class Fp8Codec(QuantisedCodec):
    """e4m3 numbers with a scale: keys per channel over the extent, values per token.

    |x - x'| <= max(|x| / 16, scale / 1024), scale = greatest magnitude of the group / 448, at least
    2**-14. `Int8Codec` is as short and errs less on keys and values; this one keeps small elements
    beside large ones.
    """

    name = "fp8"
    code = 5
    keys = Coding(None, None)
    values = Coding(None, 1)

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)


def _measured(fields: list[Field], rows: Bytes) -> list[Halves]:
    """The halves of each field; empty if there are no fields or one of them cannot be coded."""
    measured = []
    for field in fields:
        halves = field.measure(rows)
        if halves is None:
            return []
        measured.append(halves)
    return measured


def _pieces(fields: list[Field], stored: Bytes) -> list[tuple[Halves, Bytes]]:
    """Halves and codes of each field in a coded extent of the right length."""
    head = 2 * sum(field.halves for field in fields)
    # A copy is aligned and writable, which kernels compile for.
    numbers = stored[1 : 1 + head].copy().view("<f2").astype(np.float16, copy=False)
    payload = np.require(stored[1 + head :], np.uint8, ["C", "W"])
    pieces, half, at = [], 0, 0
    for field in fields:
        pieces.append((numbers[half : half + field.halves], payload[at : at + field.code_bytes]))
        half, at = half + field.halves, at + field.code_bytes
    return pieces
