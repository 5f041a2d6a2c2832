"""Numba and NumPy give the same codes and the same elements; e4m3 is torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import exactly, stored

from tierstore.kernels import quantise
from tierstore.kernels.quantise import FLOATS, Grid
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from oracles import Stored

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Answer:
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    peak: float
    codes: list[bytes]
    restored: list[bytes]


def run(rows: Stored, first: int, grid: Grid) -> Answer:
    """Everything the module does with one part of some blocks."""
    low, high, peak = quantise.ranges(rows, first, grid)
    low = low + np.float32(0)
    answer = Answer(low, high, peak, [], [])
    for bits, width in ((8, grid.channels), (4, (grid.channels + 1) // 2)):
        scale = np.maximum((high - low) / np.float32(2**bits - 1), np.float32(1e-4))
        codes, out = np.zeros((grid.lines, width), np.uint8), np.zeros_like(rows)
        quantise.encode_integers(rows, first, grid, low, scale, bits, codes)
        quantise.decode_integers(codes, low, scale, bits, grid, out, first)
        answer.codes.append(codes.tobytes())
        answer.restored.append(out.tobytes())
    scale = np.maximum(np.maximum(high, -low) / np.float32(448), np.float32(1e-4))
    codes, out = np.zeros((grid.lines, grid.channels), np.uint8), np.zeros_like(rows)
    quantise.encode_floats(rows, first, grid, scale, codes)
    quantise.decode_floats(codes, scale, grid, out, first)
    answer.codes.append(codes.tobytes())
    answer.restored.append(out.tobytes())
    return answer


@law
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from([1, 4, 32, 10_000]),
    st.sampled_from([1, 32, 100]),
    st.integers(0, 3),
    st.integers(-16, 12),
    st.integers(0, 2**32 - 1),
)
def test_numba_and_numpy_agree(
    dtype: torch.dtype,
    blocks: int,
    tokens: int,
    channels: int,
    token_group: int,
    channel_group: int,
    first: int,
    power: int,
    seed: int,
) -> None:
    numbers = np.random.default_rng(seed).normal(size=(blocks, first + tokens * channels + 2))
    rows = stored(numbers * 2.0**power, dtype)
    grid = Grid(blocks, tokens, channels, token_group, channel_group)

    compiled = run(rows, first, grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise, "cpu", None)
        plain = run(rows, first, grid)

    assert np.array_equal(compiled.low, plain.low)
    assert np.array_equal(compiled.high, plain.high)
    assert compiled.peak == plain.peak
    assert compiled.codes == plain.codes
    assert compiled.restored == plain.restored


@pytest.mark.parametrize("without_numba", [False, True])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_one_odd_element_shows_in_the_magnitude(
    odd: float, without_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_numba:
        monkeypatch.setattr(quantise, "cpu", None)
    numbers = np.ones((3, 40), np.float32)
    numbers[1, 17] = odd
    for dtype in DTYPES:
        peak = quantise.ranges(stored(numbers, dtype), 0, Grid(3, 4, 10, 1, 10))[2]
        assert not np.isfinite(peak)


def test_groups_take_the_tokens_left_over() -> None:
    """70 tokens in groups of 32: 32 and 38; 5 channels in groups of 3: 3 and 2."""
    numbers = np.arange(350.0).reshape(7, 50)
    low, high, peak = quantise.ranges(stored(numbers, torch.float32), 0, Grid(7, 10, 5, 32, 3))
    assert low.tolist() == [[0, 3], [160, 163]]
    assert high.tolist() == [[157, 159], [347, 349]]
    assert peak == 349


def test_every_e4m3_code_is_the_number_that_torch_gives() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(FLOATS, every)


def test_every_half_up_to_448_rounds_to_e4m3_as_in_torch() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    numbers = exactly(patterns, torch.float16)
    rows = patterns[np.abs(numbers) <= 448][None]
    grid = Grid(1, 1, rows.shape[1], 1, rows.shape[1])
    codes = np.zeros((1, rows.shape[1]), np.uint8)

    quantise.encode_floats(rows, 0, grid, np.ones((1, 1), np.float32), codes)

    expected = torch.from_numpy(rows).view(torch.float16).to(torch.float8_e4m3fn)
    assert np.array_equal(codes, expected.view(torch.uint8).numpy())
