"""What policies remember: compiled and plain Python agree, and do what dictionaries do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.kernels import histories
from tierstore.memory import unlimited

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[Any]

seeds = st.integers(0, 2**32 - 1)
UNITS = 150


class Blocks:
    """Segments of 1 to 200 blocks, three of which make a step; scores of units, some unknown."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.space = space = HandleSpace(unlimited())
        everyone = space.open(5)
        for segment in random.permutation(everyone).tolist():
            space.extend(np.array([segment], np.int32), int(random.integers(1, 201)))
        self.segments = random.permutation(everyone)[:3].astype(np.int32)
        width = int(random.integers(1, 260))
        self.unit_of = random.integers(-1, UNITS, (3, width)).astype(np.int32)
        self.unit_scores = random.normal(-4, 4, (3, UNITS)).astype(np.float32)
        self.shift = random.normal(0, 1, 3).astype(np.float32)

    def handles(self, row: int) -> list[int]:
        handles: list[int] = self.space.all_handles(int(self.segments[row])).tolist()
        return handles

    def column(self, dtype: npt.DTypeLike = np.float32) -> Array:
        return self.random.integers(0, 9, self.space.handles).astype(dtype)

    def arguments(self, name: str) -> tuple[Any, ...]:
        space, n = self.space, self.unit_of.shape[1]
        scores = self.random.normal(size=(3, n)).astype(np.float32)
        handles = self.random.permutation(np.concatenate([self.handles(r) for r in range(3)]))
        handles = handles.astype(np.int32)
        half = len(handles) // 2
        room = int(space.blocks.sum())
        return {
            "scores_of_blocks": (space.blocks, self.segments, self.unit_of, self.unit_scores,
                                 self.shift, np.float32(-6), np.float32(2), scores),
            "remember": (space.chunks, space.blocks, self.segments, self.unit_of, self.unit_scores,
                         self.shift, np.float32(-6), np.float32(2), np.float32(0.2),
                         np.array([0.5, 0.1], np.float32), np.array([0.5, 0.04], np.float32),
                         (self.column(), self.column()), *np.zeros((2, 1, n), np.float32)),
            "lean_forwards": (scores[0], np.float32(0.2), np.zeros(n, np.float32)),
            "blend": (space.chunks, space.blocks, self.segments, scores, np.float32(0.3),
                      np.float32(0.2), self.column()),
            "age": (space.chunks, space.blocks, self.segments, 0.9, 40.0,
                    1 + 19 * self.random.integers(0, 3, len(space.blocks)).astype(np.float64),
                    self.column()),
            "count_uses": (handles, space.owner_segment,
                           1 + self.random.random(len(space.blocks)), self.column()),
            "uses": (handles, space.owner_segment, 1 + self.random.random(len(space.blocks)),
                     self.column(), np.empty(len(handles), np.float32)),
            "stamp": (handles, 7, self.column(np.int64)),
            "take": (handles, self.column(), np.empty(len(handles), np.float32)),
            "marked": (space.chunks, space.blocks, self.segments, self.column(np.uint8), 2,
                       self.column(np.int64), 3, np.zeros(4, np.int64), np.zeros(room, np.int32),
                       np.zeros(room, np.bool_), np.zeros(3, np.int64)),
            "eligible_only": (handles, self.random.random(len(handles)) < 0.5,
                              np.array([0, half, len(handles)]),
                              np.zeros(len(handles) + 1, np.int32), np.zeros(3, np.int64)),
        }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "scores_of_blocks", "remember", "lean_forwards", "blend", "age", "count_uses", "uses",
        "stamp", "take", "marked", "eligible_only",
    ],
)  # fmt: skip
@given(seeds)
def test_compiled_loop_does_what_its_python_says(name: str, seed: int) -> None:
    compiled: Callable[..., object] = getattr(histories, name)
    ours, theirs = (Blocks(seed).arguments(name) for _ in range(2))
    results = compiled(*ours), getattr(compiled, "py_func", compiled)(*theirs)
    assert results[0] == results[1]
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, tuple):
            mine, other = np.stack(mine), np.stack(other)
        np.testing.assert_allclose(mine, other, rtol=1e-6)


@given(seeds, st.booleans(), st.booleans())
def test_a_block_has_the_score_of_its_unit(seed: int, is_shared: bool, is_counting: bool) -> None:
    blocks = Blocks(seed)
    unit_of = blocks.unit_of[:1] if is_shared else blocks.unit_of
    if is_counting:
        unit_of[...] = np.arange(unit_of.shape[1]) % UNITS
    out = np.zeros((3, unit_of.shape[1]), np.float32)

    histories.scores_of_blocks(
        blocks.space.blocks, blocks.segments, unit_of, blocks.unit_scores, blocks.shift,
        np.float32(-6), np.float32(2), out,
    )  # fmt: skip

    for row in range(3):
        table = unit_of[0 if is_shared else row].tolist()
        for block, found in enumerate(out[row].tolist()):
            unit = table[block]
            if unit < 0 or block >= len(blocks.handles(row)):
                assert np.isnan(found)
                continue
            expected = min(max(blocks.unit_scores[row, unit] - blocks.shift[row], -6), 2)
            assert found == np.float32(expected)


@given(seeds)
def test_a_mean_moves_towards_scores_and_begins_with_the_first(seed: int) -> None:
    blocks = Blocks(seed)
    random = blocks.random
    column = random.normal(size=blocks.space.handles).astype(np.float32)
    column[random.random(len(column)) < 0.3] = -np.inf
    scores = random.normal(size=blocks.unit_of.shape).astype(np.float32)
    scores[random.random(scores.shape) < 0.3] = np.nan
    expected = column.astype(np.float64)
    for row in range(3):
        for handle, new in zip(blocks.handles(row), scores[row].tolist(), strict=False):
            old = expected[handle]
            if not np.isnan(new):
                part = 0.25 if new > old else 0.125
                expected[handle] = new if old == -np.inf else (1 - part) * old + part * new

    space = blocks.space
    histories.blend(
        space.chunks, space.blocks, blocks.segments, scores, np.float32(0.25), np.float32(0.125),
        column,
    )  # fmt: skip

    np.testing.assert_allclose(column, expected, rtol=1e-5, atol=1e-6)


@given(seeds)
def test_only_blocks_of_the_segments_decay(seed: int) -> None:
    blocks = Blocks(seed)
    column = blocks.column()
    expected = column.copy()
    mine = [handle for row in range(3) for handle in blocks.handles(row)]
    expected[mine] *= np.float32(0.5)
    space = blocks.space
    factor = np.float64(0.5)
    histories._multiply(space.chunks, space.blocks, blocks.segments, factor, column)
    np.testing.assert_array_equal(column, expected)


@given(seeds, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([1.0, 2.0, 1e3, 1e15]))
def test_uses_fade_alike_however_large_the_scale_may_grow(
    seed: int, decay: float, most: float
) -> None:
    blocks = Blocks(seed)
    space, random = blocks.space, blocks.random
    column, scale = np.zeros(space.handles, np.float32), np.ones(len(space.blocks))
    mine = np.concatenate([blocks.handles(row) for row in range(3)]).astype(np.int32)
    expected = np.zeros(space.handles)
    for _ in range(40):
        used = random.permutation(mine)[: random.integers(0, len(mine) + 1)]
        histories.age(space.chunks, space.blocks, blocks.segments, decay, most, scale, column)
        histories.count_uses(used, space.owner_segment, scale, column)
        expected *= decay
        expected[used] += 1
    found = np.empty(len(mine), np.float32)
    histories.uses(mine, space.owner_segment, scale, column, found)
    np.testing.assert_allclose(found, expected[mine], rtol=1e-5, atol=1e-30)


def test_a_block_leans_on_a_higher_one_before_it() -> None:
    """By what that one had itself; a block without a score neither gives nor gets."""
    scores = np.array([1, 3, -2, np.nan, 0, -5, -6], np.float32)
    out = np.empty_like(scores)
    histories.lean_forwards(scores, np.float32(0.2), out)
    np.testing.assert_allclose(out, [1, 3, -1, np.nan, 0, -4, -5.8], rtol=1e-6)


@given(seeds)
def test_marked_blocks_come_segment_by_segment(seed: int) -> None:
    blocks = Blocks(seed)
    arguments = blocks.arguments("marked")
    marks, last_used = arguments[3], arguments[5]
    row_ptr, handles, eligible, able = arguments[7:]

    count = histories.marked(*arguments)

    assert count == row_ptr[3]
    for row in range(3):
        mine = slice(row_ptr[row], row_ptr[row + 1])
        expected = [handle for handle in blocks.handles(row) if marks[handle] & 2]
        assert handles[mine].tolist() == expected
        assert eligible[mine].tolist() == [bool(last_used[h] != 3) for h in expected]
        assert able[row] == eligible[mine].sum()


@given(seeds)
def test_only_residents_that_may_leave_are_ranked(seed: int) -> None:
    residents, eligible, row_ptr, out, out_ptr = Blocks(seed).arguments("eligible_only")
    count = histories.eligible_only(residents, eligible, row_ptr, out, out_ptr)
    assert count == out_ptr[2] == eligible.sum()
    for row in range(2):
        mine = slice(row_ptr[row], row_ptr[row + 1])
        expected = residents[mine][eligible[mine]].tolist()
        assert out[out_ptr[row] : out_ptr[row + 1]].tolist() == expected
