"""What every codec must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierstore.errors import CorruptBlockError
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Codec

extents = hnp.arrays(
    np.uint8,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=96),
    elements=st.integers(0, 255),
)
"""Blocks uint8 [n, nbytes], mostly of one repeated byte with a few others."""


class CodecTests(ABC):
    """Inherit, and make the codec. A lossy codec also overrides `check_decoded`."""

    @abstractmethod
    def make_codec(self) -> Codec:
        """A codec of the kind under test."""

    def check_decoded(self, blocks: Bytes, decoded: Bytes) -> None:
        """Assert that `decoded` is as near to `blocks` as the codec promises: equal, by default."""
        assert np.array_equal(decoded, blocks)

    @law
    @given(extents)
    def test_blocks_come_back(self, blocks: Bytes) -> None:
        self._check_round_trip(blocks)

    @pytest.mark.parametrize("shape", [(0, 64), (1, 1), (7, 51), (64, 1024)])
    def test_random_blocks_come_back(self, shape: tuple[int, int]) -> None:
        self._check_round_trip(np.random.default_rng(0).integers(0, 256, shape, np.uint8))

    def _check_round_trip(self, blocks: Bytes) -> None:
        codec, before = self.make_codec(), blocks.copy()
        stored = codec.encode(blocks)
        assert stored.dtype == np.uint8
        assert stored.ndim == 1
        assert stored.nbytes <= codec.bound(blocks.nbytes)
        assert np.array_equal(blocks, before), "encode changed its argument"
        out = np.full_like(blocks, 0xA5)
        codec.decode(stored, out)
        self.check_decoded(before, out)

    def test_equal_blocks_have_equal_codes(self) -> None:
        """Also from another codec object: what one process stored, another reads."""
        blocks = np.arange(256, dtype=np.uint8).reshape(4, 64)
        first, second = self.make_codec().encode(blocks), self.make_codec().encode(blocks.copy())
        assert np.array_equal(first, second)

    def test_blocks_need_not_be_contiguous(self) -> None:
        wide = np.arange(8 * 128, dtype=np.uint16).astype(np.uint8).reshape(8, 128)
        blocks, codec = wide[::2, 32:96], self.make_codec()
        assert np.array_equal(codec.encode(blocks), codec.encode(blocks.copy()))

    @pytest.mark.parametrize("change", ["one byte short", "one byte long", "empty"])
    def test_a_code_of_the_wrong_length_is_corrupt(self, change: str) -> None:
        codec, blocks = self.make_codec(), np.arange(192, dtype=np.uint8).reshape(3, 64)
        stored = codec.encode(blocks)
        longer = np.append(stored, stored[-1:])
        wrong = {"one byte short": stored[:-1], "one byte long": longer, "empty": stored[:0]}
        with pytest.raises(CorruptBlockError):
            codec.decode(wrong[change], np.empty_like(blocks))

    def test_it_has_a_name(self) -> None:
        codec = self.make_codec()
        assert codec.name
        assert isinstance(codec.is_lossless, bool)
