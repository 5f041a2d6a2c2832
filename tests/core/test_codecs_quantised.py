"""The lossy codecs keep their stated bounds, and their bytes are those that were promised."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ROUNDING

from tierstore.codecs import (
    Fp8Codec,
    Int4Codec,
    Int8Codec,
    K8V4Codec,
    QuantisedCodec,
    ShuffleZstdCodec,
    make_codec,
)
from tierstore.errors import ConfigError, CorruptBlockError
from tierstore.layout import BlockLayout, Part
from tierstore.testing import CodecTests
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes
    from tierstore.layout import Blocks

Floats = npt.NDArray[np.float64]

NAMES = ["int8", "int4", "k8v4", "fp8"]
BITS = {"int8": (8, 8), "int4": (4, 4), "k8v4": (8, 4), "fp8": (None, None)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def runs(count: int, group: int, *, remainder_joins: bool) -> list[slice]:
    """Consecutive groups; what is left over joins the last one or is one more."""
    starts = list(range(0, count, group))
    if remainder_joins and len(starts) > 1 and count % group:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]


def bound_of(x: Floats, bits: int | None, tokens: int, channels: int, rounding: float) -> Floats:
    """Largest error of each element [tokens, channels] by the documented rule."""
    bound = np.zeros_like(x)
    for rows in runs(len(x), tokens, remainder_joins=True):
        for columns in runs(x.shape[1], channels, remainder_joins=False):
            group = x[rows, columns]
            if bits is None:
                scale = max(np.abs(group).max() / 448, 2.0**-14) * (1 + 2.0**-10)
                error = np.maximum(np.abs(group) / 16, scale / 1024)
            else:
                low = group.min()
                span = group.max() - low + abs(low) * 2.0**-10 + 2.0**-24
                scale = max(span / (2**bits - 1), 2.0**-14) * (1 + 2.0**-10)
                error = np.full(group.shape, scale / 2)
            # The restored number is rounded to the element type; sums are made in float32.
            largest = np.abs(group).max() + scale
            bound[rows, columns] = error + largest * (rounding + 2.0**-22)
    return bound


class Oracle:
    """Reads blocks by themselves, and bounds errors part by part."""

    def __init__(self, name: str, layout: BlockLayout, value_group: int | None = None) -> None:
        self.name, self.layout = name, layout
        self.value_group = value_group or (None if name in {"int8", "fp8"} else 32)

    def part(self, blocks: Bytes, part: Part) -> torch.Tensor:
        """Elements [tokens, channels]."""
        start = sum(p.nbytes for p in self.layout.parts[: self.layout.parts.index(part)])
        rows = blocks.reshape(-1, self.layout.block_bytes)[:, start : start + part.nbytes].copy()
        channels = math.prod(part.shape[1:])
        return torch.from_numpy(rows.reshape(-1)).view(part.dtype).reshape(-1, channels)

    def check(self, blocks: Bytes, decoded: Bytes) -> None:
        halted = any(
            not (self.part(blocks, part).double().abs() <= 65504).all()
            for part in self.layout.parts
            if part.dtype in DTYPES
        )
        for part in self.layout.parts if blocks.size else ():
            before, after = self.part(blocks, part), self.part(decoded, part)
            if halted or part.dtype not in DTYPES:
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
                continue
            x, y = before.double().numpy(), after.double().numpy()
            bits = BITS[self.name][0 if part.name == "k" else 1]
            if part.name == "k":
                groups = (32 if self.name == "int4" else max(len(x), 1), 1)
            else:
                groups = (1, self.value_group or x.shape[1])
            assert (np.abs(x - y) <= bound_of(x, bits, *groups, ROUNDING[part.dtype])).all()


class QuantisedTests(CodecTests):
    name: ClassVar[str]
    layout: ClassVar[BlockLayout]

    def make_codec(self) -> QuantisedCodec:
        codec = make_codec(self.name, self.layout)
        assert isinstance(codec, QuantisedCodec)
        return codec

    def check_decoded(self, blocks: Bytes, decoded: Bytes) -> None:
        Oracle(self.name, self.layout).check(blocks, decoded)


class TestInt8Codec(QuantisedTests):
    name, dtype = "int8", torch.bfloat16
    layout = BlockLayout.kv(4, 16, torch.bfloat16)


class TestInt4Codec(QuantisedTests):
    name, dtype = "int4", torch.float16
    layout = BlockLayout.kv(12, 40, torch.float16)


class TestK8V4Codec(QuantisedTests):
    name, dtype = "k8v4", torch.float32
    layout = BlockLayout.kv(8, 16, torch.float32, value_dim=33)


class TestFp8Codec(QuantisedTests):
    name, dtype = "fp8", torch.bfloat16
    layout = BlockLayout.kv(4, 16, torch.bfloat16)


class TestInt8CodecOfAwkwardParts(QuantisedTests):
    """Parts at odd addresses, of one channel, of integers, of doubles, of two channel axes."""

    name, dtype = "int8", torch.float32
    layout = BlockLayout(
        (
            Part("flag", (3, 1), torch.int8),
            Part("k", (3, 2, 5), torch.float32),
            Part("norm", (3,), torch.float16),
            Part("place", (3, 2), torch.int32),
            Part("v", (3, 24), torch.float16),
            Part("mass", (3, 2), torch.float64),
        )
    )


def bytes_of(values: torch.Tensor, layout: BlockLayout) -> Bytes:
    flat: Bytes = values.contiguous().view(torch.uint8).numpy()
    return flat.reshape(-1, layout.block_bytes)


def normal(layout: BlockLayout, blocks: int, seed: int = 0) -> Bytes:
    generator = torch.Generator().manual_seed(seed)
    parts = {
        part.name: torch.randn(blocks, *part.shape, generator=generator).to(part.dtype)
        for part in layout.parts
        if part.is_stored
    }
    packed: Bytes = layout.pack(parts).numpy()
    return packed


@law
@given(
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(-20, 12),
    st.floats(-8, 8),
    st.integers(0, 2**32 - 1),
)
def test_errors_stay_within_the_stated_bound(
    name: str,
    dtype: torch.dtype,
    blocks: int,
    tokens: int,
    channels: int,
    power: int,
    offset: float,
    seed: int,
) -> None:
    layout = BlockLayout.kv(tokens, channels, dtype, value_dim=max(channels // 2, 1))
    numbers = np.random.default_rng(seed).standard_t(3, blocks * layout.block_bytes) + offset
    limited = np.clip(numbers * 2.0**power, -65280, 65280)
    rows = torch.from_numpy(limited[: blocks * layout.block_bytes // dtype.itemsize]).to(dtype)
    before = bytes_of(rows, layout)
    codec, after = make_codec(name, layout), np.zeros_like(before)

    codec.decode(codec.encode(before), after)

    Oracle(name, layout).check(before, after)


@pytest.mark.parametrize("name", NAMES)
def test_identical_tokens_come_back_finite(name: str) -> None:
    """The trap: a range of 0 gives a scale of 0 in half precision, and NaN."""
    layout = BlockLayout.kv(8, 32, torch.float16)
    before = bytes_of(torch.full((16, 512), 0.5, dtype=torch.float16), layout)
    codec, after = make_codec(name, layout), np.zeros_like(before)

    stored = codec.encode(before)
    codec.decode(stored, after)

    assert stored[0] != 0
    assert np.isfinite(after.view(np.float16)).all()
    Oracle(name, layout).check(before, after)


@pytest.mark.parametrize(
    ("name", "most_bits"), [("int8", 8.51), ("int4", 5.01), ("k8v4", 6.76), ("fp8", 8.26)]
)
def test_an_extent_of_128_tokens_takes_few_bits_for_an_element(name: str, most_bits: float) -> None:
    layout = BlockLayout.kv(8, 64, torch.bfloat16)
    before = normal(layout, 16)
    assert make_codec(name, layout).encode(before).nbytes * 8 / (before.nbytes / 2) < most_bits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 65536.0])
def test_one_element_that_has_no_code_leaves_the_extent_as_it_is(name: str, odd: float) -> None:
    layout = BlockLayout.kv(8, 32, torch.float32)
    before = normal(layout, 4)
    before.view(np.float32)[2, 300] = odd
    after = np.zeros_like(before)

    stored = make_codec(name, layout).encode(before)
    make_codec(name, layout).decode(stored, after)

    assert stored[0] == 0
    assert np.array_equal(stored[1:], before.reshape(-1))
    assert np.array_equal(after, before)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_half_does_not_become_infinite(name: str) -> None:
    layout = BlockLayout.kv(8, 32, torch.float16)
    values = torch.full((4, 512), 65504.0, dtype=torch.float16)
    values[:, ::2] = -65504.0
    before = bytes_of(values, layout)
    after = np.zeros_like(before)

    codec = make_codec(name, layout)
    codec.decode(codec.encode(before), after)

    assert np.isfinite(after.view(np.float16)).all()
    Oracle(name, layout).check(before, after)


def test_several_blocks_in_one_row_are_one_extent() -> None:
    """A keyed value may be a whole extent."""
    layout = BlockLayout.kv(8, 32, torch.bfloat16)
    blocks = normal(layout, 6)
    codec, after = Int8Codec(layout), np.zeros((1, blocks.nbytes), np.uint8)

    stored = codec.encode(blocks.reshape(1, -1))
    codec.decode(stored, after)

    assert np.array_equal(stored, codec.encode(blocks))
    Oracle("int8", layout).check(blocks, after)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_not_whole_are_refused(name: str) -> None:
    codec = make_codec(name, BlockLayout.kv(8, 32, torch.bfloat16))
    wrong = np.zeros((1, 1000), np.uint8)
    with pytest.raises(ConfigError, match=r"shape \(1, 1000\) .*: expected \[n, a multiple of"):
        codec.encode(wrong)
    with pytest.raises(ConfigError, match=r"shape \(1, 1000\)"):
        codec.decode(np.zeros(1001, np.uint8), wrong)


@pytest.mark.parametrize("kind", [Int4Codec, K8V4Codec])
def test_groups_of_values_are_read_whatever_the_reader_was_made_for(
    kind: type[Int4Codec | K8V4Codec],
) -> None:
    layout = BlockLayout.kv(8, 128, torch.bfloat16)
    before = normal(layout, 16)
    narrow, wide = kind(layout, 32).encode(before), kind(layout, 64).encode(before)
    after = np.zeros_like(before)

    kind(layout, 32).decode(wide, after)

    assert (narrow[0], wide[0]) == (32, 64)
    assert wide.nbytes < narrow.nbytes
    Oracle(kind.name, layout, 64).check(before, after)


@pytest.mark.parametrize("value_group", [0, 16, 33, 128])
def test_another_group_of_values_is_refused(value_group: int) -> None:
    with pytest.raises(ConfigError, match=rf"value_group={value_group} in codec 'int4': expected"):
        Int4Codec(BlockLayout.kv(8, 64, torch.bfloat16), value_group)


def test_parts_that_are_rebuilt_take_no_bytes() -> None:
    def rebuild(blocks: Blocks) -> torch.Tensor:
        return blocks["v"]

    stored = Part("v", (8, 32), torch.bfloat16)
    derived = BlockLayout((Part("k", (8, 32), torch.bfloat16, rebuild), stored))
    before = normal(BlockLayout((stored,)), 4)
    assert np.array_equal(
        Int8Codec(derived).encode(before), Int8Codec(BlockLayout((stored,))).encode(before)
    )


def test_errors_of_int8_are_a_quarter_of_those_of_fp8() -> None:
    layout = BlockLayout.kv(8, 64, torch.float32)
    before = normal(layout, 16)
    errors = []
    for codec in (Int8Codec(layout), Fp8Codec(layout)):
        after = np.zeros_like(before)
        codec.decode(codec.encode(before), after)
        errors.append(np.square(after.view(np.float32) - before.view(np.float32)).mean() ** 0.5)
    assert errors[0] < errors[1] / 4


# Bytes on disk, worked out by hand.

ONE, ZERO, MINUS_TWO, TWO = b"\x00\x3c", b"\x00\x00", b"\x00\xc0", b"\x00\x40"


def values_only(tokens: int, channels: int) -> BlockLayout:
    return BlockLayout((Part("v", (tokens, channels), torch.float32),))


def test_int8_values_are_stored_as_documented() -> None:
    layout = values_only(2, 4)
    steps = [[0, 51, 254, 255], [255, 1, 128, 0]]
    before = bytes_of(torch.tensor(steps, dtype=torch.float32), layout)
    stored = Int8Codec(layout).encode(before)
    assert stored.tobytes() == b"\1" + ZERO * 2 + ONE * 2 + bytes([0, 51, 254, 255, 255, 1, 128, 0])


def test_int8_keys_are_stored_as_documented() -> None:
    """Two channels over four tokens in two blocks: ends of channels, then codes token by token."""
    layout = BlockLayout((Part("k", (8, 2), torch.float32),))
    first, second = [0, 255, 7, 9, 0, 0, 0, 0], [-2, 508, 0, 2, 4, -2, -2, 8]
    before = bytes_of(torch.tensor([first, second], dtype=torch.float32).T, layout)
    codes = [pair for x, y in zip(first, second, strict=True) for pair in (x, (y + 2) // 2)]
    stored = Int8Codec(layout).encode(before)
    assert stored.tobytes() == b"\1" + ZERO + MINUS_TWO + ONE + TWO + bytes(codes)


def test_int4_values_are_stored_as_documented() -> None:
    """Five channels: byte j holds channel j below and channel 3 + j above."""
    layout = values_only(1, 5)
    before = bytes_of(torch.tensor([[0.0, 15, 3, 7, 9]]), layout)
    stored = Int4Codec(layout).encode(before)
    assert stored.tobytes() == bytes([32]) + ZERO + ONE + bytes([0x70, 0x9F, 0x03])


def test_k8v4_is_stored_as_documented() -> None:
    """All ends and scales first: of k, then of v; then codes of k, then of v."""
    layout = BlockLayout.kv(2, 4, torch.float32)
    keys, values = [[0.0] * 4, [255.0] * 4], [[0.0, 15, 1, 2]] * 2
    before = bytes_of(torch.tensor(keys + values), layout)
    stored = K8V4Codec(layout).encode(before)
    ends = ZERO * 4 + ONE * 4 + ZERO * 2 + ONE * 2
    assert stored.tobytes() == (
        bytes([32]) + ends + bytes([0] * 4 + [255] * 4) + bytes([0x10, 0x2F] * 2)
    )


def test_fp8_values_are_stored_as_documented() -> None:
    layout = values_only(1, 6)
    before = bytes_of(torch.tensor([[448.0, -448, 1, -1.125, 2.0**-9, 0]]), layout)
    stored = Fp8Codec(layout).encode(before)
    assert stored.tobytes() == b"\1" + ONE + bytes([0x7E, 0xFE, 0x38, 0xB9, 0x01, 0x00])


# Stored bytes that no `encode` makes, under the right length.


def encoded_values(codec_kind: type[QuantisedCodec]) -> Bytes:
    layout = values_only(1, 32)
    return codec_kind(layout).encode(bytes_of(torch.arange(32.0)[None], layout)).copy()


@pytest.mark.parametrize(
    ("half", "meaning"),
    [
        (0x0000, "zero"),
        (0x03FF, "subnormal"),
        (0xBC00, "negative"),
        (0x7C00, "infinite"),
        (0x7E00, "NaN"),
    ],
)
@pytest.mark.parametrize("kind", [Int8Codec, Fp8Codec])
def test_a_scale_is_corrupt_that_is(
    kind: type[Int8Codec | Fp8Codec], half: int, meaning: str
) -> None:
    stored = encoded_values(kind)
    at = 3 if kind is Int8Codec else 1
    stored[at : at + 2] = np.array([half], "<u2").view(np.uint8)
    out = np.full((1, 128), 0xA5, np.uint8)

    with pytest.raises(CorruptBlockError, match="scales or codes that none is given"):
        kind(values_only(1, 32)).decode(stored, out)
    assert (out == 0xA5).all(), meaning


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00, 0xFE00])
def test_an_end_is_corrupt_that_is_not_finite(half: int) -> None:
    stored = encoded_values(Int8Codec)
    stored[1:3] = np.array([half], "<u2").view(np.uint8)
    with pytest.raises(CorruptBlockError):
        Int8Codec(values_only(1, 32)).decode(stored, np.zeros((1, 128), np.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_an_fp8_code_of_nan_is_corrupt(code: int) -> None:
    stored = encoded_values(Fp8Codec)
    stored[-1] = code
    with pytest.raises(CorruptBlockError):
        Fp8Codec(values_only(1, 32)).decode(stored, np.zeros((1, 128), np.uint8))


@pytest.mark.parametrize("mark", [2, 31, 64, 255])
def test_an_unknown_first_byte_is_corrupt(mark: int) -> None:
    stored = encoded_values(Int8Codec)
    stored[0] = mark
    with pytest.raises(CorruptBlockError, match=rf"begins with {mark}: expected one of \[0, 1\]"):
        Int8Codec(values_only(1, 32)).decode(stored, np.zeros((1, 128), np.uint8))


def test_the_code_of_another_codec_is_corrupt() -> None:
    layout = values_only(1, 32)
    stored = ShuffleZstdCodec(4).encode(np.zeros((1, 128), np.uint8))
    with pytest.raises(CorruptBlockError):
        K8V4Codec(layout).decode(stored, np.zeros((1, 128), np.uint8))
