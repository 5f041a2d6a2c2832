"""Sparse attention over blocks and strips, both CPU backends against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ROUNDING, attention, exactly, stored

from tierstore import kernels
from tierstore.kernels import BlockShape, reference

if TYPE_CHECKING:
    from oracles import Floats, Stored

GAP = 3
"""Elements between keys and values, and behind the values: whatever stands there is not read."""

# (query heads per row, tokens per block, key dim, value dim, element type): each is compiled once.
SHAPES = [
    (1, 1, 64, 64, torch.float32),
    (2, 4, 64, 64, torch.bfloat16),
    (3, 4, 64, 64, torch.float32),
    (4, 4, 128, 128, torch.bfloat16),
    (5, 3, 96, 64, torch.float16),
    (6, 7, 64, 96, torch.float32),
    (7, 16, 80, 80, torch.bfloat16),
    (8, 8, 128, 256, torch.float16),
    (1, 32, 256, 128, torch.bfloat16),
]
TINY = (2, 2, 8, 4, torch.float32)


def shape_name(shape: tuple[int, int, int, int, torch.dtype]) -> str:
    group, tokens, key_dim, value_dim, dtype = shape
    return f"G{group}-P{tokens}-d{key_dim}-e{value_dim}-{str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Case:
    """Arguments of `attend_blocks`. Memory that the contract does not name is full of NaN."""

    dtype: torch.dtype
    shape: BlockShape
    query: Stored
    pool: Stored
    row_ptr: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    valid: npt.NDArray[np.uint8]
    strip_key: Stored
    strip_value: Stored
    strip_length: npt.NDArray[np.int32]
    scale: float

    @property
    def rows(self) -> int:
        return len(self.strip_length)

    def row_tokens(self, row: int) -> tuple[Floats, Floats]:
        """Keys and values that count for one row, one token after the other."""
        shape = self.shape
        pool = exactly(self.pool, self.dtype)
        keys = [exactly(self.strip_key[row, : self.strip_length[row]], self.dtype)]
        values = [exactly(self.strip_value[row, : self.strip_length[row]], self.dtype)]
        for i in range(self.row_ptr[row], self.row_ptr[row + 1]):
            block = pool[self.slots[i]]
            for token in range(self.valid[i]):
                first = token * shape.key_dim
                keys.append(block[None, first : first + shape.key_dim])
                first = shape.value_offset + token * shape.value_dim
                values.append(block[None, first : first + shape.value_dim])
        return np.concatenate(keys), np.concatenate(values)

    def expected(self) -> tuple[Floats, Floats]:
        query = exactly(self.query, self.dtype)
        results = [
            attention(query[row], *self.row_tokens(row), self.scale) for row in range(self.rows)
        ]
        return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])

    def outputs(self, dtype: torch.dtype) -> tuple[Stored, npt.NDArray[np.float32]]:
        """Unwritten `out` and `lse`."""
        shape = (*self.query.shape[:2], self.shape.value_dim)
        return stored(np.full(shape, np.nan), dtype), np.full(shape[:2], np.nan, np.float32)

    def run(
        self, backend: str, out: Stored, lse: npt.NDArray[np.float32], *, merge: bool = False
    ) -> None:
        if backend == "torch":
            reference.attend_blocks(
                self.query, self.pool, self.shape, self.row_ptr, self.slots, self.valid,
                self.strip_key, self.strip_value, self.strip_length, self.scale, out, lse,
                merge=merge,
            )  # fmt: skip
            return
        blocks = int(np.diff(self.row_ptr).max(initial=0))
        width = blocks * self.shape.tokens + self.strip_key.shape[1]
        weights = np.full((*self.query.shape[:2], width), np.nan, np.float32)
        kernels.attend_blocks(
            self.query, self.pool, self.shape, self.row_ptr, self.slots, self.valid, self.strip_key,
            self.strip_value, self.strip_length, self.scale, out, lse, weights, merge=merge,
        )  # fmt: skip


def make_case(
    shape: tuple[int, int, int, int, torch.dtype],
    blocks_of_row: list[int],
    strip_length: list[int],
    seed: int,
    *,
    spread: float = 1.0,
) -> Case:
    """Random keys, values and ragged blocks; logits have a standard deviation of `spread`."""
    group, tokens, key_dim, value_dim, dtype = shape
    random = np.random.default_rng(seed)
    rows, n = len(blocks_of_row), sum(blocks_of_row)
    offset = tokens * key_dim + GAP
    pool = np.full((n + 2, offset + tokens * value_dim + GAP), np.nan)
    slots = random.permutation(n + 2)[:n].astype(np.int32)
    valid = random.integers(0, tokens + 1, n).astype(np.uint8)
    pool[slots, : tokens * key_dim] = random.standard_normal((n, tokens * key_dim))
    pool[slots, offset : offset + tokens * value_dim] = random.standard_normal(
        (n, tokens * value_dim)
    )
    room = max(strip_length) + 1
    strip_key, strip_value = (np.full((rows, room, dim), np.nan) for dim in (key_dim, value_dim))
    for row, length in enumerate(strip_length):
        strip_key[row, :length] = random.standard_normal((length, key_dim))
        strip_value[row, :length] = random.standard_normal((length, value_dim))
    return Case(
        dtype=dtype,
        shape=BlockShape(tokens, key_dim, value_dim, offset),
        query=stored(random.standard_normal((rows, group, key_dim)), dtype),
        pool=stored(pool, dtype),
        row_ptr=np.concatenate([[0], np.cumsum(blocks_of_row)]).astype(np.int64),
        slots=slots,
        valid=valid,
        strip_key=stored(strip_key, dtype),
        strip_value=stored(strip_value, dtype),
        strip_length=np.array(strip_length, np.int32),
        scale=spread * key_dim**-0.5,
    )


def assert_close(
    found: Floats, expected: Floats, dtype: torch.dtype, *, spread: float = 1.0
) -> None:
    """Float32 arithmetic over values of order one, then one rounding to `dtype`."""
    atol = 3e-6 * max(1.0, spread)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING[dtype] + 1e-6, atol=atol)


def assert_lse_close(
    found: npt.NDArray[np.float32], expected: Floats, *, spread: float = 1.0
) -> None:
    """A log-sum-exp is as exact as the logits, whose error grows with their size."""
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * max(1.0, spread))


ragged = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@given(ragged, seeds, st.sampled_from([0.1, 1.0, 10.0]))
def test_result_is_attention_over_valid_tokens_and_strip(
    shape: tuple[int, int, int, int, torch.dtype],
    backend: str,
    rows: list[tuple[int, int]],
    seed: int,
    spread: float,
) -> None:
    case = make_case(shape, [b for b, _ in rows], [s for _, s in rows], seed, spread=spread)
    out, lse = case.outputs(case.dtype)

    case.run(backend, out, lse)

    expected, expected_lse = case.expected()
    assert_close(exactly(out, case.dtype), expected, case.dtype, spread=spread)
    assert_lse_close(lse, expected_lse, spread=spread)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("merge", [False, True])
def test_row_without_tokens_gives_zeros_and_no_mass(backend: str, merge: bool) -> None:
    case = make_case(TINY, [0, 2, 0], [0, 0, 0], seed=1)
    case.valid[:] = 0
    out, lse = case.outputs(torch.float32)
    if merge:
        out[:], lse[:] = 0, -np.inf

    case.run(backend, out, lse, merge=merge)

    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_no_rows_is_no_work(backend: str) -> None:
    case = make_case(TINY, [1], [1], seed=2)
    none = replace(
        case,
        query=case.query[:0],
        row_ptr=case.row_ptr[:1],
        slots=case.slots[:0],
        valid=case.valid[:0],
        strip_key=case.strip_key[:0],
        strip_value=case.strip_value[:0],
        strip_length=case.strip_length[:0],
    )
    out, lse = none.outputs(torch.float32)

    none.run(backend, out, lse)

    assert len(out) == 0


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_garbage_behind_valid_tokens_changes_nothing(
    backend: str, dtype: torch.dtype
) -> None:
    case = make_case((2, 4, 16, 8, dtype), [3, 1], [2, 0], seed=3)
    out, lse = case.outputs(dtype)
    case.run(backend, out, lse)
    largest = stored(torch.finfo(dtype).max, dtype)
    for slot, valid in zip(case.slots, case.valid, strict=True):
        case.pool[slot, valid * 16 : 4 * 16] = largest
        case.pool[slot, case.shape.value_offset + valid * 8 : case.shape.value_offset + 4 * 8] = (
            largest
        )
    with_garbage, lse_with_garbage = case.outputs(dtype)

    case.run(backend, with_garbage, lse_with_garbage)

    np.testing.assert_array_equal(with_garbage, out)
    np.testing.assert_array_equal(lse_with_garbage, lse)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_pick_the_largest_and_do_not_overflow(
    backend: str, sign: float, dtype: torch.dtype
) -> None:
    """Logits are 163,840 times `sign` in blocks, 131,072 in strips: the larger share all mass."""
    case = replace(make_case((2, 4, 16, 8, dtype), [2, 1], [1, 3], seed=4), scale=1.0)
    first_channel = np.eye(1, 16)
    case.query[:] = stored(first_channel * 1024, dtype)
    case.strip_key[:] = stored(first_channel * 128 * sign, dtype)
    case.pool[:, : 4 * 16] = stored(np.tile(first_channel * 160 * sign, 4), dtype)
    out, lse = case.outputs(dtype)

    case.run(backend, out, lse)

    expected, expected_lse = case.expected()
    assert_close(exactly(out, dtype), expected, dtype)
    assert_lse_close(lse, expected_lse)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[int], list[int], int, list[int], int]:
    """Blocks and strip length of each row, passes, the pass of each block and of the strip."""
    blocks = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    strips = draw(st.lists(st.integers(0, 4), min_size=len(blocks), max_size=len(blocks)))
    passes = draw(st.integers(1, 5))
    number = st.integers(0, passes - 1)
    pass_of_block = draw(st.lists(number, min_size=sum(blocks), max_size=sum(blocks)))
    return blocks, strips, passes, pass_of_block, draw(number)


def part_of(case: Case, chosen: npt.NDArray[np.bool_], *, with_strip: bool) -> Case:
    """The case with some of its blocks, and with or without its strips."""
    rows = np.repeat(np.arange(case.rows), np.diff(case.row_ptr))[chosen]
    return replace(
        case,
        row_ptr=np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=case.rows))]),
        slots=case.slots[chosen],
        valid=case.valid[chosen],
        strip_length=case.strip_length if with_strip else np.zeros_like(case.strip_length),
    )


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(partitions(), seeds, st.sampled_from([1.0, 30.0]))
def test_merged_passes_over_any_partition_are_full_attention(
    backend: str,
    dtype: torch.dtype,
    partition: tuple[list[int], list[int], int, list[int], int],
    seed: int,
    spread: float,
) -> None:
    blocks, strips, passes, pass_of_block, pass_of_strip = partition
    case = make_case((3, 4, 64, 64, dtype), blocks, strips, seed, spread=spread)
    out, lse = case.outputs(torch.float32)

    for number in range(passes):
        part = part_of(
            case, np.array(pass_of_block, int) == number, with_strip=number == pass_of_strip
        )
        part.run(backend, out, lse, merge=number > 0)

    expected, expected_lse = case.expected()
    assert_close(exactly(out, torch.float32), expected, torch.float32, spread=spread)
    assert_lse_close(lse, expected_lse, spread=spread)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_merging_with_an_empty_set_keeps_what_was_there(backend: str) -> None:
    case = make_case(TINY, [2, 3], [1, 0], seed=5)
    out, lse = case.outputs(torch.float32)
    case.run(backend, out, lse)
    kept, kept_lse = out.copy(), lse.copy()
    nothing = part_of(case, np.zeros(5, np.bool_), with_strip=False)

    nothing.run(backend, out, lse, merge=True)

    np.testing.assert_allclose(exactly(out, torch.float32), exactly(kept, torch.float32), rtol=1e-6)
    assert_lse_close(lse, kept_lse.astype(np.float64))


def test_one_slot_may_serve_several_rows_and_several_times_one_row() -> None:
    case = make_case(TINY, [2, 2], [0, 0], seed=6)
    case.slots[:], case.valid[:] = case.slots[0], 2
    out, lse = case.outputs(torch.float32)

    case.run("numba", out, lse)

    expected, expected_lse = case.expected()
    assert_close(exactly(out, torch.float32), expected, torch.float32)
    assert_lse_close(lse, expected_lse)


def test_views_of_larger_arrays_are_taken_as_they_are() -> None:
    """The engine may pass strips and outputs that are cut from wider arrays."""
    case = make_case((3, 4, 64, 64, torch.float32), [2, 3], [3, 1], seed=7)
    wide = replace(
        case,
        query=np.repeat(case.query, 2, axis=0)[::2],
        strip_key=np.repeat(case.strip_key, 2, axis=1)[:, ::2],
        strip_value=np.repeat(case.strip_value, 2, axis=1)[:, ::2],
    )
    out, lse = (
        np.full((4, 3, 64), np.nan, np.float32)[::2],
        np.full((4, 3), np.nan, np.float32)[::2],
    )

    wide.run("numba", out, lse)

    expected, expected_lse = case.expected()
    assert_close(exactly(out.copy(), torch.float32), expected, torch.float32)
    assert_lse_close(lse, expected_lse)
