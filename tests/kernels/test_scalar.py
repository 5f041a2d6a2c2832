"""Conversions of stored elements, over all 16-bit patterns, and the CPU kernels' exponential."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit
from oracles import stored

from tierstore.kernels.cpu.scalar import (
    FAST,
    exp_nonpositive,
    from_ordered,
    log_positive,
    narrow,
    ordered,
    widen,
)

if TYPE_CHECKING:
    from oracles import Stored

Singles = npt.NDArray[np.float32]


@njit()
def widen_all(elements: Stored, out: Singles) -> None:
    for i in range(elements.shape[0]):
        out[i] = widen(elements[i])  # type: ignore[call-arg]


@njit()
def narrow_all(values: Singles, out: Stored) -> None:
    for i in range(values.shape[0]):
        out[i] = narrow(values[i], out[i])  # type: ignore[call-arg]


@njit(fastmath=FAST)
def exp_all(x: Singles, out: Singles) -> None:
    for i in range(x.shape[0]):
        out[i] = exp_nonpositive(x[i])


@njit(fastmath=FAST)
def log_all(x: Singles, out: Singles) -> None:
    for i in range(x.shape[0]):
        out[i] = log_positive(x[i])


@njit()
def order_all(x: Singles, keys: npt.NDArray[np.int32], back: Singles) -> None:
    for i in range(x.shape[0]):
        keys[i] = ordered(x[i])
        back[i] = from_ordered(keys[i])


def singles(*values: float) -> Singles:
    return np.array(values, np.float32)


ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [(torch.bfloat16, ALL_PATTERNS), (torch.float16, ALL_PATTERNS.view(np.int16))],
)
def test_every_16_bit_pattern_widens_as_in_torch(dtype: torch.dtype, patterns: Stored) -> None:
    found = np.empty(len(patterns), np.float32)

    widen_all(patterns, found)

    expected = torch.from_numpy(patterns).view(dtype).float().numpy()
    assert_same_floats(found, expected)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [(torch.bfloat16, ALL_PATTERNS), (torch.float16, ALL_PATTERNS.view(np.int16))],
)
def test_every_16_bit_pattern_survives_widening_and_narrowing(
    dtype: torch.dtype, patterns: Stored
) -> None:
    values, back = np.empty(len(patterns), np.float32), np.empty_like(patterns)

    widen_all(patterns, values)
    narrow_all(values, back)

    is_nan = np.isnan(values)
    np.testing.assert_array_equal(back[~is_nan], patterns[~is_nan])
    assert torch.from_numpy(back[is_nan]).view(dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_in_torch(dtype: torch.dtype) -> None:
    """All finite 16-bit numbers, the midpoints between them, and the float32 beside each."""
    numbers = torch.from_numpy(ALL_PATTERNS.view(np.int16)).view(dtype).float().numpy()
    finite = np.sort(numbers[np.isfinite(numbers)])
    middles = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    near = np.concatenate([finite, middles]).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    extremes = singles(np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65519.9, 65520.0, 1e-45, -0.0)
    up, down = np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))
    values = np.concatenate([near, up, down, random, extremes])
    found = stored(np.zeros(len(values)), dtype)

    narrow_all(values, found)

    expected = torch.from_numpy(values).to(dtype)
    assert_same_floats(
        torch.from_numpy(found).view(dtype).float().numpy(), expected.float().numpy()
    )


def test_single_precision_passes_through() -> None:
    values = singles(0.1, -0.0, np.inf, 1e-45)
    widened, narrowed = np.empty_like(values), np.empty_like(values)

    widen_all(values, widened)
    narrow_all(values, narrowed)

    assert_same_floats(widened, values)
    assert_same_floats(narrowed, values)


def test_exponential_is_as_exact_as_its_docstring_says() -> None:
    random = np.random.default_rng(0)
    steps = [-np.logspace(-45, np.log10(87), 300_000), random.uniform(-87, 0, 1_000_000)]
    x = np.concatenate([*steps, np.arange(-87, 1), [-0.0]]).astype(np.float32)
    found = np.empty_like(x)

    exp_all(x, found)

    exact = np.exp(x.astype(np.float64))
    relative_error = np.abs(found - exact) / exact
    assert (relative_error < (4 - 2 * x.astype(np.float64)) * 2.0**-24).all()


def test_exponential_has_a_floor_and_is_one_at_zero() -> None:
    x = singles(0.0, -0.0, -87.0, -88.0, -1e30, -np.inf)
    found = np.empty_like(x)

    exp_all(x, found)

    floor = float(np.exp(-87.0))
    np.testing.assert_allclose(found, [1, 1, floor, floor, floor, floor], rtol=6e-6)
    assert (found[:2] == 1).all()
    assert floor < 2e-38


def assert_same_floats(found: Singles, expected: Singles) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


def test_logarithm_is_as_exact_as_its_docstring_says() -> None:
    random = np.random.default_rng(0)
    wide = np.exp(random.uniform(-87, 88, 500_000))
    x = np.concatenate([wide, 1 + np.logspace(-7, 1, 500_000), 1 - np.logspace(-7, -0.01, 500_000)])
    x = np.append(x.astype(np.float32), singles(1.0, 2.0, 0.5, np.sqrt(0.5), np.sqrt(2.0)))
    found = np.empty_like(x)

    log_all(x, found)

    exact = np.log(x.astype(np.float64))
    assert (np.abs(found - exact) <= 4e-7 * np.abs(exact)).all()


def test_ordered_integers_compare_as_their_numbers_do() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    numbers = np.append(random[~np.isnan(random)], singles(-np.inf, np.inf, 0.0, 1e-45, -1e-45))
    x = np.append(np.sort(numbers), np.float32(np.nan))
    keys, back = np.empty(len(x), np.int32), np.empty_like(x)

    order_all(x, keys, back)

    assert_same_floats(back, x)
    assert (np.diff(keys.astype(np.int64))[np.diff(x) > 0] > 0).all()
    assert keys.argmax() == len(x) - 1
