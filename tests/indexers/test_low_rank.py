"""Low-rank keys: nothing is lost at full rank, and as little as can be below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.indexers import LowRankKeys

if TYPE_CHECKING:
    from oracles import Floats

HEADS, DIM = 2, 16


def tables(n: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(3, 3 + n)[:, None] * 10_000.0 ** -(torch.arange(half) / max(half, 1))
    return angles.cos(), angles.sin()


def turned(plain: Floats, cos: torch.Tensor, sin: torch.Tensor) -> Floats:
    """Keys [H, n, d] with channels j and j + h turned as complex numbers."""
    half = cos.shape[1]
    pairs = plain[..., :half] + 1j * plain[..., half : 2 * half]
    pairs = pairs * (cos.double() + 1j * sin.double()).numpy()
    return np.concatenate([pairs.real, pairs.imag, plain[..., 2 * half :]], -1)


@pytest.mark.parametrize("half", [0, 5, 8])
@given(st.integers(1, 80), st.integers(0, 2**32 - 1))
def test_full_rank_gives_the_keys_back(half: int, n: int, seed: int) -> None:
    keys = torch.randn(HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))
    cos, sin = tables(n, half)

    found = LowRankKeys.of(keys, rank=HEADS * DIM, cos=cos, sin=sin)

    torch.testing.assert_close(found.keys(), keys, rtol=1e-5, atol=1e-5)


@given(st.integers(1, HEADS * DIM), st.integers(0, 2**32 - 1))
def test_no_product_of_the_rank_is_nearer(rank: int, seed: int) -> None:
    """Against the singular values in float64 (Eckart and Young).

    Products of keys are summed in float32, which loses what is below 3e-4 of the largest.
    """
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((200, HEADS * DIM)) * 0.7 ** np.arange(HEADS * DIM)
    mixed = mixed @ random.standard_normal((HEADS * DIM, HEADS * DIM))
    plain = mixed.reshape(200, HEADS, DIM).transpose(1, 0, 2)
    cos, sin = tables(200, DIM // 2)
    keys = turned(plain, cos, sin)

    found = LowRankKeys.of(torch.from_numpy(keys).float(), rank=rank, cos=cos, sin=sin)

    error = np.sqrt(((found.keys().double().numpy() - keys) ** 2).sum())
    singular = np.linalg.svd(mixed, compute_uv=False)
    lost = np.sqrt((singular[rank:] ** 2).sum())
    assert error <= 1.01 * lost + 3e-4 * singular[0]


def test_keys_turned_back_need_a_lower_rank() -> None:
    """One key at 100 positions: rank 1 before it was turned, more after."""
    cos, sin = tables(100, DIM // 2)
    keys = torch.from_numpy(turned(np.ones((HEADS, 100, DIM)), cos, sin)).float()

    turned_back = LowRankKeys.of(keys, rank=1, cos=cos, sin=sin)
    as_they_are = LowRankKeys.of(keys, rank=1)

    torch.testing.assert_close(turned_back.keys(), keys, rtol=1e-4, atol=1e-4)
    assert (as_they_are.keys() - keys).abs().max() > 0.5


@pytest.mark.parametrize("half", [0, 8])
def test_its_bytes_are_factors_and_tables(half: int) -> None:
    keys = torch.randn(HEADS, 100, DIM).to(torch.bfloat16)
    cos, sin = tables(100, half)

    found = LowRankKeys.of(keys, rank=12, cos=cos, sin=sin)

    assert found.nbytes == 2 * (100 * 12 + HEADS * 12 * DIM) + 2 * 4 * 100 * half


@pytest.mark.parametrize("rank", [0, HEADS * DIM + 1])
def test_a_rank_beyond_the_dimensions_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank={rank}: expected 1 to 32"):
        LowRankKeys.of(torch.ones(HEADS, 5, DIM), rank=rank)


@pytest.mark.parametrize("shape", [(4, 8), (5, 9), (5, 7)])
def test_tables_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"expected both \[5, h\]"):
        LowRankKeys.of(
            torch.ones(HEADS, 5, DIM), rank=3, cos=torch.ones(shape), sin=torch.ones(5, 8)
        )
