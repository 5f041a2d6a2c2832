"""Triton kernels of a decoding step against the reference and float64 NumPy.

`test_triton` runs the suites under Triton's interpreter; on a machine with a GPU
``PYTHONPATH=tests/kernels pytest tests/kernels/triton_*suite.py`` runs them on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_device import MARKS, back, examples, few, seeds, there
from oracles import Stored, exactly, stored
from test_attend_blocks import (  # type: ignore[import-not-found]
    TINY,
    Case,
    assert_close,
    assert_lse_close,
    make_case,
    shape_name,
)

from tierstore.kernels import quantise, reference, tables, triton
from tierstore.kernels.quantise import Grid
from tierstore.kernels.triton import attend
from tierstore.kernels.triton import quantise as device_quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.kernels.element import Array

pytestmark = MARKS

# (query heads per row, dim, element type)
SCORED = [
    (1, 64, torch.bfloat16),
    (3, 80, torch.float32),
    (4, 128, torch.float16),
    (7, 96, torch.bfloat16),
    (8, 256, torch.float32),
]


def singles(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return random.standard_normal(shape).astype(np.float32)


def run_attention(
    case: Case, out: Stored, lse: Stored, *, merge: bool = False
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    result, sums = there(out), there(lse)
    triton.attend_blocks(
        there(case.query), there(case.pool), case.shape, case.row_ptr, case.slots, case.valid,
        there(case.strip_key), there(case.strip_value), case.strip_length, case.scale, result, sums,
        merge=merge,
    )  # fmt: skip
    return back(result), back(sums)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 64, 64, torch.float32),
        (2, 4, 64, 64, torch.bfloat16),
        (4, 4, 128, 128, torch.bfloat16),
        (5, 3, 96, 64, torch.float16),
        (7, 16, 80, 80, torch.bfloat16),
        (8, 32, 256, 128, torch.float16),
    ],
    ids=shape_name,
)
@few
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=2),
    seeds,
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_attention_over_blocks_and_strip(
    shape: tuple[int, int, int, int, torch.dtype],
    rows: list[tuple[int, int]],
    seed: int,
    spread: float,
) -> None:
    """As exact as the CPU's: float32 arithmetic, then one rounding to the element type."""
    case = make_case(shape, [b for b, _ in rows], [s for _, s in rows], seed, spread=spread)

    out, lse = run_attention(case, *case.outputs(case.dtype))

    expected, expected_lse = case.expected()
    assert_close(exactly(out, case.dtype), expected, case.dtype, spread=max(spread, 1.0))
    assert_lse_close(lse, expected_lse, spread=spread)


@few
@given(st.integers(1, 200), seeds)
def test_a_row_is_attended_in_parts(blocks: int, seed: int) -> None:
    """One row of many blocks is shared out over programs, and the parts are merged."""
    case = make_case((2, 4, 64, 64, torch.float32), [blocks], [3], seed)

    out, lse = run_attention(case, *case.outputs(torch.float32))

    expected, expected_lse = case.expected()
    assert_close(out, expected, torch.float32)
    assert_lse_close(lse, expected_lse)


def test_parts_fill_the_device_but_each_is_worth_a_program() -> None:
    assert attend.parts_of(1, 1000, 4, 264) == 63
    assert attend.parts_of(8, 1000, 4, 264) == 33
    assert attend.parts_of(512, 1000, 4, 264) == 1
    assert attend.parts_of(1, 1, 4, 264) == 1
    assert attend.parts_of(0, 0, 4, 264) == 1


@few
@given(st.integers(1, 30), st.integers(0, 9), seeds)
def test_merging_two_sets_is_attention_over_both(blocks: int, strip: int, seed: int) -> None:
    case = make_case((3, 4, 64, 64, torch.float32), [blocks], [strip], seed)
    cut = blocks // 2
    first, second = (
        Case(**{**vars(case), "row_ptr": np.array([0, len(part)]), "slots": case.slots[part],
                "valid": case.valid[part], "strip_length": length})
        for part, length in (
            (np.arange(cut), case.strip_length),
            (np.arange(cut, blocks), np.zeros(1, np.int32)),
        )
    )  # fmt: skip

    out, lse = run_attention(first, *case.outputs(torch.float32))
    out, lse = run_attention(second, out, lse, merge=True)

    expected, expected_lse = case.expected()
    assert_close(out, expected, torch.float32)
    assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("merge", [False, True])
def test_a_row_without_tokens_gives_zeros_and_no_mass(merge: bool) -> None:
    case = make_case(TINY, [0, 2, 0], [0, 0, 0], seed=1)
    case.valid[:] = 0
    out, lse = case.outputs(torch.float32)
    if merge:
        out[:], lse[:] = 0, -np.inf

    out, lse = run_attention(case, out, lse, merge=merge)

    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_nan_is_seen() -> None:
    case = make_case(TINY, [2, 2], [1, 1], seed=3)
    case.strip_key[0, 0, 0] = np.nan

    out, lse = run_attention(case, *case.outputs(torch.float32))

    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("shape", SCORED, ids=lambda s: f"G{s[0]}-d{s[1]}-{s[2]}")
@few
@given(st.lists(st.integers(0, 150), min_size=1, max_size=3), seeds)
def test_dot_and_box_logits(
    shape: tuple[int, int, torch.dtype], counts: list[int], seed: int
) -> None:
    """Products of 16-bit floats are exact in float32; what is behind a row's units is NaN."""
    group, dim, dtype = shape
    random = np.random.default_rng(seed)
    rows, room = len(counts), max(counts) + 1
    query = stored(random.standard_normal((rows, group, dim)), dtype)
    a, b = random.standard_normal((2, rows, room, dim))
    for row, count in enumerate(counts):
        a[row, count:], b[row, count:] = np.nan, np.nan
    high, low = stored(np.maximum(a, b), dtype), stored(np.minimum(a, b), dtype)
    n = np.array(counts, np.int32)
    dots, boxes = (there(np.full((rows, group, room), np.nan, np.float32)) for _ in range(2))

    triton.dot_logits(there(query), there(high), n, 0.5, dots)
    triton.box_logits(there(query), there(high), there(low), n, 0.5, boxes)

    for row, count in enumerate(counts):
        q = exactly(query[row], dtype)
        top, bottom = exactly(high[row, :count], dtype), exactly(low[row, :count], dtype)
        bound = np.maximum(q[:, None] * top, q[:, None] * bottom).sum(-1)
        for found, expected in ((back(dots), q @ top.T), (back(boxes), bound)):
            np.testing.assert_allclose(
                found[row, :, :count], expected * 0.5, rtol=1e-5, atol=1e-6 * dim
            )
            assert np.isnan(found[row, :, count:]).all()


@examples(8)
@given(
    st.sampled_from(["sum", "max", "mean_group", "mean_all", "per_query"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
    st.lists(st.integers(0, 2200), min_size=2, max_size=2),
    seeds,
)
def test_heads_combine_as_the_reference_combines_them(
    aggregate: str, softmax: bool, sized: bool, group: int, counts: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    if aggregate == "mean_all":
        counts = counts[:1] * 2
    room = max(counts) + 1
    logits = singles(random, 2, group, room) * 5
    sizes = random.choice([0, 1, 4, 60], (2, room)).astype(np.float32) if sized else None
    n = np.array(counts, np.int32)
    beside = None
    if random.integers(2):
        beside = random.choice([-np.inf, 0.0, 8.0], (2, group)).astype(np.float32)
    expected = np.zeros((2, room), np.float32)
    reference.combine_heads(logits.copy(), n, sizes, 4.0, beside, aggregate, softmax, 2, expected)

    out = there(np.zeros((2, room), np.float32))
    triton.combine_heads(
        there(logits), n, sizes if sizes is None else there(sizes), 4.0,
        beside if beside is None else there(beside), aggregate, softmax, 2, out,
    )  # fmt: skip

    for row, count in enumerate(counts):
        np.testing.assert_allclose(
            back(out)[row, :count], expected[row, :count], rtol=2e-6, atol=2e-5
        )


@few
@given(
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    seeds,
)
def test_pages_pool_as_the_reference_pools_them(
    per_block: int, softmax: bool, coarse: bool, keeps: bool, blocks: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, room = len(blocks), max(blocks) + 1
    pages = room * per_block
    scores = singles(random, rows, 37 if coarse else pages)
    scores[random.random(scores.shape) < 0.2] = -np.inf
    unit_of = random.integers(0, 37, (rows, pages)).astype(np.int32) if coarse else None
    kept = random.random((rows, room)) < 0.1 if keeps else None
    n = np.array(blocks, np.int32)
    expected = np.zeros((rows, room), np.float32)
    reference.pool_pages(scores, unit_of, kept, n, per_block, softmax, expected)

    out = there(np.zeros((rows, room), np.float32))
    triton.pool_pages(there(scores), unit_of, kept, n, per_block, softmax, out)

    np.testing.assert_allclose(back(out), expected, rtol=2e-6, atol=2e-6)


@examples(4)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 60)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_selection_is_that_of_the_reference(
    rows: list[tuple[int, int]], shared: bool, tied: bool, seed: int
) -> None:
    """Ids, order and pointers are equal: ties, both zeros and -inf included."""
    random = np.random.default_rng(seed)
    counts = np.array([n for n, _ in rows], np.int32)
    room = int(counts.max()) + 1
    scores = singles(random, len(rows), room)
    if tied:
        scores = random.choice([-np.inf, -1.5, -0.0, 0.0, 2.0], scores.shape).astype(np.float32)
    tables_ = 1 if shared else len(rows)
    costs = random.integers(0, 4, (tables_, room)).astype(np.int32)
    starts = (np.cumsum(costs, 1) - costs).astype(np.int32)
    members = np.stack([random.permutation(3 * room) for _ in range(tables_)]).astype(np.int32)
    budgets = np.array([b for _, b in rows], np.int32)
    total = int(budgets.sum())

    def empty() -> tuple[Stored, Stored, Stored]:
        return (
            np.zeros(len(rows) + 1, np.int64), np.full(total, -1, np.int32),
            np.zeros(total, np.float32),
        )  # fmt: skip

    expected, found = empty(), tuple(map(there, empty()))
    arguments = (counts, costs, starts, members, budgets)
    wanted = reference.select_blocks(scores, *arguments, *expected)

    assert triton.select_blocks(there(scores), *arguments, *found) == wanted
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(back(ours)[:wanted], theirs[:wanted])


@few
@given(st.integers(0, 9), st.sampled_from([3, 512, 1500]), seeds)
def test_blocks_are_gathered(n: int, elements: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = stored(random.standard_normal((12, elements)), torch.bfloat16)
    slots = random.integers(0, 12, n).astype(np.int32)
    out = there(np.zeros((n, elements), np.uint16))

    triton.gather_blocks(there(pool), slots, out)

    np.testing.assert_array_equal(back(out), pool[slots])


@pytest.mark.parametrize("fault", ["none", "unknown", "negative", "twice"])
def test_judging_is_that_of_the_directory(fault: str) -> None:
    random = np.random.default_rng(5)
    lengths, blocks_of = [300, 0, 40], np.array([70, 64, 500], np.int32)
    segments = np.array([2, 1, 0], np.int32)
    row_ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chunks = random.permutation(3 * 8).reshape(3, 8).astype(np.int32)
    handles = chunks.size * tables.CHUNK
    blocks = np.concatenate(
        [random.permutation(blocks_of[s])[:n] for s, n in zip(segments, lengths, strict=True)]
    ).astype(np.int32)
    bad = 310
    if fault != "none":
        blocks[bad] = {"unknown": 70, "negative": -1, "twice": blocks[320]}[fault]
    slot_of = random.integers(-1, 90, handles).astype(np.int32)
    valid_of = random.integers(0, 5, handles).astype(np.uint8)

    def run(
        operation: Callable[..., int], place: Callable[[Stored], Array]
    ) -> tuple[int, list[npt.NDArray[Any]]]:
        outputs = [
            place(np.full(handles, -1, np.int64)), place(np.zeros(340, np.int32)),
            place(np.zeros(340, np.int32)), place(np.zeros(340, np.uint8)),
        ]  # fmt: skip
        directory = (place(chunks), blocks_of, segments, row_ptr, blocks, slot_of, valid_of)
        return operation(*directory, outputs[0], 7, *outputs[1:]), outputs

    expected, theirs = run(tables.judge, lambda array: array)
    found, ours = run(triton.judge, there)

    if fault == "none":
        assert found == expected > 0
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(back(mine), other)
    elif fault == "twice":
        assert found in {-1 - bad, -1 - 320}
    else:
        assert found == expected == -1 - bad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@few
@given(
    st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 9), st.sampled_from([3, 64, 80]),
    st.integers(1, 20), st.sampled_from([1, 7, 32, 64]), seeds,
)  # fmt: skip
def test_codes_are_those_of_the_cpu(
    dtype: torch.dtype, bits: int, blocks: int, tokens: int, channels: int, token_group: int,
    channel_group: int, seed: int,
) -> None:  # fmt: skip
    random = np.random.default_rng(seed)
    grid = Grid(blocks, tokens, channels, token_group, channel_group)
    first, gap = 5, 2
    rows = stored(random.standard_normal((blocks, first + tokens * channels + gap)) * 3, dtype)
    low, high, peak = quantise.ranges(rows, first, grid)
    scale = np.maximum((high - low) / np.float32((1 << bits) - 1), np.float32(1e-6))
    width = channels if bits == 8 else -(-channels // 2)
    codes = np.zeros((grid.lines, width), np.uint8)
    quantise.encode_integers(rows, first, grid, low, scale, bits, codes)
    restored = rows.copy()
    quantise.decode_integers(codes, low, scale, bits, grid, restored, first)

    least, most = (there(np.zeros(grid.shape, np.float32)) for _ in range(2))
    top = device_quantise.ranges(there(rows), first, grid, least, most)
    own = there(np.zeros_like(codes))
    device_quantise.encode_integers(there(rows), first, grid, there(low), there(scale), bits, own)
    again = there(rows.copy())
    device_quantise.decode_integers(own, there(low), there(scale), bits, grid, again, first)

    np.testing.assert_array_equal(back(least), low)
    np.testing.assert_array_equal(back(most), high)
    assert top == peak
    np.testing.assert_array_equal(back(own), codes)
    np.testing.assert_array_equal(back(again), restored)


def test_the_range_of_a_nan_is_no_number() -> None:
    rows = np.zeros((1, 64), np.float32)
    rows[0, 9] = np.nan
    least, most = (there(np.zeros((1, 4), np.float32)) for _ in range(2))

    assert np.isnan(device_quantise.ranges(there(rows), 0, Grid(1, 1, 64, 1, 16), least, most))
