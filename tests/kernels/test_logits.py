"""Logits of index units, vectors and boxes, both CPU backends against float64 NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import exactly, stored

from tierstore import kernels
from tierstore.kernels import reference

if TYPE_CHECKING:
    from types import ModuleType

    import numpy.typing as npt
    from oracles import Floats

# (query heads per row, dim, element type of queries, of units): each is compiled once.
SHAPES = [
    (1, 64, torch.bfloat16, torch.bfloat16),
    (3, 64, torch.float32, torch.float32),
    (4, 128, torch.bfloat16, torch.bfloat16),
    (5, 80, torch.float16, torch.float16),
    (7, 25, torch.float32, torch.bfloat16),
    (8, 256, torch.float16, torch.float16),
]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"G{s[0]}-d{s[1]}-{s[3]}")
both_backends = pytest.mark.parametrize("operations", [kernels, reference], ids=["numba", "torch"])
over_rows = given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 2**32 - 1))

Shape = tuple[int, int, torch.dtype, torch.dtype]


def compare(
    found: npt.NDArray[np.float32], expected: list[Floats], magnitudes: list[Floats]
) -> None:
    """Rounding errors grow with the sum of the magnitudes; places behind a row stay NaN."""
    for own, logits, magnitude in zip(found, expected, magnitudes, strict=True):
        count = logits.shape[1]
        assert (np.abs(own[:, :count] - logits) <= 3e-6 * magnitude + 1e-30).all()
        assert np.isnan(own[:, count:]).all()


@over_shapes
@both_backends
@over_rows
def test_vectors_score_by_their_dot_products(
    shape: Shape, operations: ModuleType, counts: list[int], seed: int
) -> None:
    """Places behind a row's units are NaN."""
    group, dim, asked, dtype = shape
    random = np.random.default_rng(seed)
    query = stored(random.standard_normal((len(counts), group, dim)), asked)
    values = random.standard_normal((len(counts), max(counts) + 1, dim))
    for row, count in enumerate(counts):
        values[row, count:] = np.nan
    units, scale = stored(values, dtype), dim**-0.5
    out = np.full((len(counts), group, units.shape[1]), np.nan, np.float32)

    operations.dot_logits(query, units, np.array(counts, np.int32), scale, out)

    q, u = exactly(query, asked) * scale, exactly(units, dtype)
    own = [u[row, :count].T for row, count in enumerate(counts)]
    compare(
        out,
        [q[row] @ keys for row, keys in enumerate(own)],
        [abs(q[row]) @ abs(keys) for row, keys in enumerate(own)],
    )


@over_shapes
@both_backends
@over_rows
def test_boxes_score_by_their_best_corner(
    shape: Shape, operations: ModuleType, counts: list[int], seed: int
) -> None:
    group, dim, asked, dtype = shape
    random = np.random.default_rng(seed)
    query = stored(random.standard_normal((len(counts), group, dim)), asked)
    ends = random.standard_normal((2, len(counts), max(counts) + 1, dim))
    for row, count in enumerate(counts):
        ends[:, row, count:] = np.nan
    high, low = stored(ends.max(0), dtype), stored(ends.min(0), dtype)
    out, scale = np.full((len(counts), group, high.shape[1]), np.nan, np.float32), dim**-0.5

    operations.box_logits(query, high, low, np.array(counts, np.int32), scale, out)

    q = exactly(query, asked)[:, :, None] * scale
    corners = np.stack([q * exactly(side, dtype)[:, None] for side in (high, low)])
    compare(
        out,
        [corners[:, row, :, :n].max(0).sum(-1) for row, n in enumerate(counts)],
        [abs(corners[:, row, :, :n]).max(0).sum(-1) for row, n in enumerate(counts)],
    )


@both_backends
def test_a_box_is_decided_channel_by_channel(operations: ModuleType) -> None:
    query = np.array([[[1.0, -1.0], [0.0, 2.0]]], np.float32)
    high, low = np.array([[[3.0, 5.0]]], np.float32), np.array([[[-7.0, -2.0]]], np.float32)
    out = np.empty((1, 2, 1), np.float32)

    operations.box_logits(query, high, low, np.array([1], np.int32), 0.5, out)

    assert out.tolist() == [[[2.5], [5.0]]]
