"""What a strip takes of a row's attention, both CPU backends against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import attention, exactly, stored

from tierstore import kernels
from tierstore.kernels import reference

SHAPES = [(1, 64, torch.bfloat16), (3, 64, torch.float32), (8, 256, torch.float16)]

both_backends = pytest.mark.parametrize("backend", ["numba", "torch"])


@both_backends
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"G{s[0]}-d{s[1]}-{s[2]}")
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1.0, 30.0]),
)
def test_a_strip_weighs_the_log_sum_exp_of_its_logits(
    shape: tuple[int, int, torch.dtype], backend: str, lengths: list[int], seed: int, spread: float
) -> None:
    """Places behind a strip's tokens are infinite."""
    group, dim, dtype = shape
    random = np.random.default_rng(seed)
    rows, room, scale = len(lengths), max(lengths) + 1, spread * dim**-0.5
    query = stored(random.standard_normal((rows, group, dim)), dtype)
    keys = random.standard_normal((rows, room, dim))
    for row, length in enumerate(lengths):
        keys[row, length:] = np.inf
    strip, out = stored(keys, dtype), np.full((rows, group), np.nan, np.float32)

    weigh = kernels.weigh_strips if backend == "numba" else reference.weigh_strips
    weigh(query, strip, np.array(lengths, np.int32), scale, out)

    for row, length in enumerate(lengths):
        own = exactly(strip[row, :length], dtype)
        _, lse = attention(exactly(query[row], dtype), own, own, scale)
        np.testing.assert_allclose(out[row], lse, rtol=1e-6, atol=3e-6 * max(1.0, spread))
