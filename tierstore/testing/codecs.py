"""What every codec must do."""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierstore.errors import CorruptBlockError
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Codec

NOT_FINITE = {
    "NaN": [np.nan],
    "infinity": [np.inf],
    "minus infinity": [-np.inf],
    "NaN in one place": [*range(50), np.nan],
    "infinity in one place": [*range(50), -np.inf],
}
FINITE = {
    "zero": [0.0],
    "minus zero": [-0.0],
    "one number": [0.1],
    "large numbers": [60000.0, -60000.0],
    "nearly equal numbers": [1.0, 1.0, 1.0 + 2.0**-10],
    "subnormal numbers": [2.0**-24, -(2.0**-24), 0.0],
    "one large number among small ones": [*[1e-3] * 50, 30000.0],
}
CHANGES = ["one byte short", "one byte long", "empty"]


class CodecTests(ABC):
    """Inherit, and make the codec. A lossy codec also overrides `check_decoded`.

    dtype: elements that the codec takes the bytes for; a lossless codec need not say.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    @abstractmethod
    def make_codec(self) -> Codec:
        """A codec of the kind under test."""

    def check_decoded(self, blocks: Bytes, decoded: Bytes) -> None:
        """Assert that `decoded` is as near to `blocks` as the codec promises: equal, by default.

        Both are uint8 [n, nbytes]; a lossy codec reads them as `dtype`, and compares with its
        stated bound, computed from `blocks` by other means than its own.
        """
        assert np.array_equal(decoded, blocks)

    @law
    @given(st.data())
    def test_blocks_come_back(self, data: st.DataObject) -> None:
        codec = self.make_codec()
        shape = st.tuples(st.integers(1, 24), st.integers(1, max(96 // codec.unit_bytes, 2)))
        rows, units = data.draw(shape)
        wide = (rows, units * codec.unit_bytes)
        blocks = data.draw(hnp.arrays(np.uint8, wide, elements=st.integers(0, 255)))
        self._check_round_trip(codec, blocks)

    @law
    @given(
        hnp.arrays(np.float32, 48, elements=st.floats(-60000.0, 60000.0, width=32)),
        st.integers(1, 8),
        st.integers(-24, 0),
    )
    def test_numbers_come_back(
        self, numbers: npt.NDArray[np.float32], rows: int, power: int
    ) -> None:
        codec = self.make_codec()
        self._check_round_trip(codec, self._blocks(codec, numbers * 2.0**power, rows))

    @pytest.mark.parametrize("shape", [(0, 64), (1, 0), (1, 1), (7, 51), (64, 1024)])
    def test_random_blocks_come_back(self, shape: tuple[int, int]) -> None:
        codec, (rows, wanted) = self.make_codec(), shape
        wide = (rows, -(-wanted // codec.unit_bytes) * codec.unit_bytes)
        blocks = np.random.default_rng(0).integers(0, 256, wide, np.uint8)
        self._check_round_trip(codec, blocks)

    @pytest.mark.parametrize("payload", FINITE)
    def test_special_numbers_come_back(self, payload: str) -> None:
        codec = self.make_codec()
        self._check_round_trip(codec, self._blocks(codec, FINITE[payload], 5))

    @pytest.mark.parametrize("payload", NOT_FINITE)
    def test_numbers_that_are_not_finite_come_back_byte_for_byte(self, payload: str) -> None:
        codec = self.make_codec()
        blocks = self._blocks(codec, NOT_FINITE[payload], 5)
        out = np.full_like(blocks, 0xA5)

        codec.decode(codec.encode(blocks), out)

        assert np.array_equal(out, blocks)

    def test_equal_blocks_have_equal_codes(self) -> None:
        """Also from another codec object: what one process stored, another reads."""
        blocks = self._normal_blocks(self.make_codec(), 4)
        first, second = self.make_codec().encode(blocks), self.make_codec().encode(blocks.copy())
        assert np.array_equal(first, second)

    def test_blocks_need_not_be_contiguous(self) -> None:
        codec = self.make_codec()
        blocks = _spread_out(self._normal_blocks(codec, 4))
        stored = codec.encode(blocks)
        out = _spread_out(np.zeros(blocks.shape, np.uint8))

        codec.decode(stored, out)

        assert np.array_equal(stored, codec.encode(blocks.copy()))
        self.check_decoded(blocks.copy(), out.copy())

    def test_blocks_and_codes_may_be_read_only(self) -> None:
        codec = self.make_codec()
        blocks = self._normal_blocks(codec, 4)
        read_only = np.frombuffer(blocks.tobytes(), np.uint8).reshape(blocks.shape)
        stored = np.frombuffer(codec.encode(read_only).tobytes(), np.uint8)
        out = np.zeros_like(blocks)

        codec.decode(stored, out)

        self.check_decoded(blocks, out)

    def test_blocks_may_stand_at_odd_addresses(self) -> None:
        codec = self.make_codec()
        blocks = self._normal_blocks(codec, 4)
        odd = _at_odd_address(blocks)
        out = _at_odd_address(np.zeros_like(blocks))

        codec.decode(_at_odd_address(codec.encode(odd)), out)

        self.check_decoded(blocks, out.copy())

    def test_threads_may_share_a_codec(self) -> None:
        codec = self.make_codec()
        many = [self._normal_blocks(codec, 4, seed) for seed in range(16)]
        expected = [codec.encode(blocks).tobytes() for blocks in many]

        def round_trip(blocks: Bytes) -> tuple[bytes, Bytes]:
            stored, out = codec.encode(blocks), np.zeros_like(blocks)
            codec.decode(stored, out)
            return stored.tobytes(), out

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(round_trip, many))
        assert [stored for stored, _ in found] == expected
        for blocks, (_, out) in zip(many, found, strict=True):
            self.check_decoded(blocks, out)

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_code_of_the_wrong_length_is_corrupt(self, change: str) -> None:
        codec = self.make_codec()
        for blocks in self._kinds_of_blocks(codec):
            stored = codec.encode(blocks)
            wrong = {
                "one byte short": stored[:-1],
                "one byte long": np.append(stored, stored[-1:]),
                "empty": stored[:0],
            }
            with pytest.raises(CorruptBlockError):
                codec.decode(wrong[change], np.empty_like(blocks))

    @law
    @given(st.binary(max_size=300), st.integers(0, 255), st.integers(0, 2))
    def test_foreign_bytes_fill_the_blocks_or_are_corrupt(
        self, body: bytes, first: int, rows: int
    ) -> None:
        codec = self.make_codec()
        foreign = np.frombuffer(bytes([first]) + body, np.uint8)
        _decode_guarded(codec, foreign, (rows, -(-32 // codec.unit_bytes) * codec.unit_bytes))

    @pytest.mark.parametrize("shape", [(0, 1), (1, 0), (1, 1)])
    def test_every_code_of_one_byte_fills_the_blocks_or_is_corrupt(
        self, shape: tuple[int, int]
    ) -> None:
        codec = self.make_codec()
        for code in range(256):
            wide = (shape[0], shape[1] * codec.unit_bytes)
            _decode_guarded(codec, np.array([code], np.uint8), wide)

    @law
    @given(st.data())
    def test_damaged_codes_fill_the_blocks_or_are_corrupt(self, data: st.DataObject) -> None:
        codec = self.make_codec()
        blocks = data.draw(st.sampled_from(self._kinds_of_blocks(codec)))
        damaged = codec.encode(blocks).copy()
        place = st.integers(0, damaged.nbytes - 1) | st.integers(0, min(15, damaged.nbytes - 1))
        for at in data.draw(st.lists(place, min_size=1, max_size=4)):
            damaged[at] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
        end = data.draw(st.just(damaged.nbytes) | st.integers(0, damaged.nbytes))
        _decode_guarded(codec, damaged[:end], blocks.shape)

    def test_damaged_codes_claim_no_memory(self) -> None:
        codec, generator = self.make_codec(), np.random.default_rng(0)
        blocks = self._normal_blocks(codec, 4)
        stored = codec.encode(blocks)
        tracemalloc.start()
        try:
            for at in range(min(stored.nbytes, 300)):
                damaged = stored.copy()
                damaged[at] = generator.integers(0, 256)
                with suppress(CorruptBlockError):
                    codec.decode(damaged, np.empty_like(blocks))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * (stored.nbytes + blocks.nbytes) + (1 << 20)

    def test_it_has_a_name_and_a_code(self) -> None:
        codec = self.make_codec()
        assert codec.name
        assert codec.code in range(256)
        assert codec.unit_bytes >= 1
        assert isinstance(codec.is_lossless, bool)

    def _check_round_trip(self, codec: Codec, blocks: Bytes) -> None:
        before = blocks.copy()
        stored = codec.encode(blocks)
        assert stored.dtype == np.uint8
        assert stored.ndim == 1
        assert stored.nbytes <= codec.bound(blocks.nbytes)
        assert np.array_equal(blocks, before), "encode changed its argument"
        out = np.full_like(blocks, 0xA5)
        codec.decode(stored, out)
        self.check_decoded(before, out)

    def _blocks(self, codec: Codec, numbers: npt.ArrayLike, rows: int) -> Bytes:
        """`rows` blocks of at least 64 elements each that repeat `numbers`."""
        size = self.dtype.itemsize
        wide = -(-64 * size // codec.unit_bytes) * codec.unit_bytes
        count = -(-rows * wide // size)
        elements = torch.from_numpy(np.resize(np.asarray(numbers, np.float32), count))
        flat: Bytes = elements.to(self.dtype).view(torch.uint8).numpy()[: rows * wide]
        return flat.reshape(rows, wide)

    def _normal_blocks(self, codec: Codec, rows: int, seed: int = 0) -> Bytes:
        return self._blocks(codec, np.random.default_rng(seed).normal(size=10_000), rows)

    def _kinds_of_blocks(self, codec: Codec) -> list[Bytes]:
        """Blocks that a codec may store in different ways."""
        random = np.random.default_rng(1).integers(0, 256, 10_000).astype(np.uint8)
        normal = self._normal_blocks(codec, 3)
        noise = np.resize(random, normal.shape)
        return [normal, noise, np.zeros_like(normal), self._blocks(codec, [np.nan], 3)]


def _spread_out(blocks: Bytes) -> Bytes:
    """Equal blocks with other bytes between rows and at their ends."""
    rows, nbytes = blocks.shape
    wide = np.full((2 * rows, nbytes + 32), 0xA5, np.uint8)
    wide[::2, 16 : 16 + nbytes] = blocks
    return wide[::2, 16 : 16 + nbytes]


def _at_odd_address(blocks: Bytes) -> Bytes:
    moved = np.empty(blocks.nbytes + 1, np.uint8)[1:].reshape(blocks.shape)
    moved[...] = blocks
    return moved


def _decode_guarded(codec: Codec, stored: Bytes, shape: tuple[int, ...]) -> None:
    """Decode between two rows that must stay as they are."""
    rows, nbytes = shape
    around = np.full((rows + 2, nbytes), 0xA5, np.uint8)
    with suppress(CorruptBlockError):
        codec.decode(stored, around[1:-1])
    assert (around[[0, -1]] == 0xA5).all(), "decode wrote outside its blocks"
