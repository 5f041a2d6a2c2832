"""Attention over keys rebuilt from low-rank factors, both CPU backends against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ROUNDING, Floats, Stored, attention, exactly, stored

from tierstore import kernels
from tierstore.kernels import BlockShape, reference

if TYPE_CHECKING:
    from types import ModuleType

# (query heads per row, tokens per block, key dim, value dim, rank, channel pairs turned, type)
Shape = tuple[int, int, int, int, int, int, torch.dtype]
SHAPES: list[Shape] = [
    (1, 1, 64, 64, 40, 32, torch.float32),
    (3, 8, 64, 64, 16, 32, torch.bfloat16),
    (4, 8, 128, 128, 160, 0, torch.bfloat16),
    (2, 5, 80, 96, 33, 24, torch.float16),
    (7, 4, 64, 32, 8, 16, torch.float32),
]
TINY: Shape = (2, 2, 8, 4, 5, 3, torch.float32)
HEADS = 2

both_backends = pytest.mark.parametrize("operations", [kernels, reference], ids=["numba", "torch"])


def turned(keys: Floats, angles: Floats) -> Floats:
    """Channels j and j + h of keys [n, d] as complex numbers, turned by angles [n, h]."""
    half = angles.shape[1]
    pairs = (keys[:, :half] + 1j * keys[:, half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag, keys[:, 2 * half :]], 1)


@dataclass(frozen=True)
class Case:
    """Arguments of `attend_low_rank` for two sequences of two rows. The pool has NaN for keys."""

    shape: Shape
    query: Stored
    left: Stored
    right: Stored
    angles: Floats
    pool: Stored
    row_ptr: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    valid: npt.NDArray[np.uint8]

    def expected(self, row: int) -> tuple[Floats, Floats]:
        _group, tokens, dim, value_dim, _, _, dtype = self.shape
        chosen = slice(self.row_ptr[row], self.row_ptr[row + 1])
        live = np.arange(tokens) < self.valid[chosen, None]
        numbers = (self.blocks[chosen, None] * tokens + np.arange(tokens))[live]
        left, right = exactly(self.left, dtype), exactly(self.right, dtype)
        plain = left[row // HEADS, numbers] @ right[row]
        values = exactly(self.pool, dtype)[self.slots[chosen], tokens * dim :]
        values = values.reshape(-1, tokens, value_dim)[live]
        query = exactly(self.query, dtype)[row]
        return attention(query, turned(plain, self.angles[numbers]), values, dim**-0.5)

    def run(
        self, operations: ModuleType, out: Stored, lse: npt.NDArray[np.float32], merge: bool = False
    ) -> None:
        group, tokens, dim, value_dim, *_ = self.shape
        longest = int(np.diff(self.row_ptr).max())
        weights = (
            {}
            if operations is reference
            else {"weights": np.empty((len(self.query), group, longest * tokens), np.float32)}
        )
        operations.attend_low_rank(
            self.query, self.left, self.right, np.cos(self.angles).astype(np.float32),
            np.sin(self.angles).astype(np.float32), self.pool,
            BlockShape(tokens, dim, value_dim, tokens * dim), self.row_ptr, self.blocks,
            self.slots, self.valid, dim**-0.5, out, lse, **weights, merge=merge,
        )  # fmt: skip


def make(shape: Shape, counts: list[int], seed: int) -> Case:
    group, tokens, dim, value_dim, rank, half, dtype = shape
    random = np.random.default_rng(seed)
    rows, room = len(counts), max(counts) + 1
    pool = random.standard_normal((rows * room, tokens * (dim + value_dim)))
    pool[:, : tokens * dim] = np.nan
    return Case(
        shape,
        stored(random.standard_normal((rows, group, dim)) * 2, dtype),
        stored(random.standard_normal((rows // HEADS, room * tokens, rank)) * rank**-0.5, dtype),
        stored(random.standard_normal((rows, rank, dim)), dtype),
        random.uniform(-3, 3, (room * tokens, half)).astype(np.float32).astype(np.float64),
        stored(pool, dtype),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([random.permutation(room)[:n] for n in counts]).astype(np.int32),
        random.permutation(rows * room)[: sum(counts)].astype(np.int32),
        random.integers(1, tokens + 1, sum(counts)).astype(np.uint8),
    )


def assert_attends(case: Case, out: Floats, lse: npt.NDArray[np.float32], rounding: float) -> None:
    for row in range(len(out)):
        expected, sums = case.expected(row)
        np.testing.assert_allclose(out[row], expected, rtol=2 * rounding, atol=3e-5 + rounding)
        np.testing.assert_allclose(lse[row], sums, rtol=1e-5, atol=1e-5)


@both_backends
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"G{s[0]}-P{s[1]}-d{s[2]}-k{s[4]}-{s[6]}")
@given(st.lists(st.integers(0, 6), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_it_is_attention_over_the_rebuilt_keys(
    shape: Shape, operations: ModuleType, counts: list[int], seed: int
) -> None:
    """A row without blocks gets zeros and -inf."""
    case, dtype = make(shape, counts, seed), shape[-1]
    out = stored(np.full((4, shape[0], shape[3]), np.nan), dtype)
    lse = np.full((4, shape[0]), np.nan, np.float32)

    case.run(operations, out, lse)

    assert_attends(case, exactly(out, dtype), lse, ROUNDING[dtype])


@both_backends
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_parts_merge_to_attention_over_all(
    operations: ModuleType, counts: list[int], seed: int
) -> None:
    """Each row's blocks in two calls; either may have none of them."""
    case = make(TINY, counts, seed)
    cut = np.random.default_rng(seed).integers(0, np.array(counts) + 1)
    out, lse = np.full((4, 2, 4), np.nan, np.float32), np.full((4, 2), np.nan, np.float32)
    ids = np.arange(sum(counts)) - np.repeat(case.row_ptr[:-1], counts)
    is_first = ids < np.repeat(cut, counts)

    for chosen, merge in ((is_first, False), (~is_first, True)):
        inside = np.concatenate([[0], np.cumsum(chosen)])[case.row_ptr]
        part = Case(
            case.shape, case.query, case.left, case.right, case.angles, case.pool,
            inside.astype(np.int64), case.blocks[chosen], case.slots[chosen], case.valid[chosen],
        )  # fmt: skip
        part.run(operations, out, lse, merge)

    assert_attends(case, out.astype(np.float64), lse, ROUNDING[torch.float32])


@both_backends
def test_a_query_that_is_no_number_shows(operations: ModuleType) -> None:
    case = make(TINY, [2, 1, 2, 3], 0)
    case.query[1, 0, 0] = np.nan
    out, lse = np.zeros((4, 2, 4), np.float32), np.zeros((4, 2), np.float32)

    case.run(operations, out, lse)

    assert np.isnan(out[1, 0]).all()
    assert np.isnan(lse).tolist() == [[False, False], [True, False], [False] * 2, [False] * 2]
