"""Handles of blocks: dense, stable while a segment lives, and new blocks when they come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.errors import CapacityError
from tierstore.kernels.tables import CHUNK
from tierstore.memory import Memory, unlimited


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-80, 80)), max_size=20))
def test_a_handle_is_one_block_for_as_long_as_the_block_lives(
    changes: list[tuple[int, int]],
) -> None:
    """Segments grow and are cut in any order; the model is each block's handle when it came."""
    space = HandleSpace(unlimited())
    born = space.column(np.int64, fill=-7)
    segments = space.open(4)
    model: dict[int, list[int]] = {segment: [] for segment in segments.tolist()}
    for number, (row, count) in enumerate(changes):
        segment = int(segments[row])
        if count < 0:
            left = max(0, len(model[segment]) + count)
            space.truncate(segment, left)
            del model[segment][left:]
        else:
            handles = space.extend(segments[row : row + 1], count)[0]
            assert (born.array[handles] == -7).all(), "a new block remembers an old one"
            born.array[handles] = number
            model[segment] += handles.tolist()
        alive = [handle for handles in model.values() for handle in handles]
        assert len(set(alive)) == len(alive)
        for each, handles in model.items():
            assert space.all_handles(each).tolist() == handles
            assert (space.owner_segment[np.array(handles, int) // CHUNK] == each).all()
    most = sum(-(-len(handles) // CHUNK) for handles in model.values())
    assert space.handles >= most * CHUNK


def test_segments_grow_together_and_by_the_same_number() -> None:
    space = HandleSpace(unlimited())
    segments = space.open(3)
    space.extend(segments[1:2], 60)
    handles = space.extend(segments, 10)
    assert handles.shape == (3, 10)
    assert space.blocks[segments].tolist() == [10, 70, 10]
    assert handles[1].tolist() == space.all_handles(int(segments[1]), 60).tolist()


def test_what_was_reserved_needs_no_more_memory() -> None:
    memory = Memory(1 << 20)
    space = HandleSpace(memory)
    space.column(np.int64)
    space.reserve(5, 100)
    before = memory.used_bytes, memory.peak_bytes
    segments = space.open(5)
    space.reserve_blocks(segments, 100)
    space.extend(segments, 100)
    assert (memory.used_bytes, memory.peak_bytes) == before


def test_closed_segments_give_their_numbers_and_handles_to_others() -> None:
    memory = Memory(1 << 20)
    space = HandleSpace(memory)
    segments = space.open(3)
    space.extend(segments, 2 * CHUNK)
    used = memory.used_bytes
    for segment in segments.tolist():
        space.close(segment)
    again = space.open(3)
    assert sorted(again) == sorted(segments)
    space.extend(again, 2 * CHUNK)
    assert memory.used_bytes == used


def test_cutting_beyond_the_end_changes_nothing() -> None:
    space = HandleSpace(unlimited())
    segments = space.open(1)
    handles = space.extend(segments, 3)
    space.truncate(int(segments[0]), 9)
    assert space.all_handles(int(segments[0])).tolist() == handles[0].tolist()


@pytest.mark.parametrize("more", [CHUNK, 4 * CHUNK])
def test_growth_that_does_not_fit_leaves_everything_usable(more: int) -> None:
    """Some of the tables have grown when there is no room for the next."""
    memory = Memory(1 << 14)
    space = HandleSpace(memory)
    columns = [space.column(np.int64, fill=number) for number in range(3)]
    segments = space.open(1)
    handles = space.extend(segments, CHUNK)
    rest = memory.take(memory.free_bytes - 20 * more, np.uint8, "test")
    with pytest.raises(CapacityError):
        space.extend(segments, more)
    assert space.all_handles(int(segments[0])).tolist() == handles[0].tolist()
    memory.give(rest)
    space.extend(segments, CHUNK)
    for number, column in enumerate(columns):
        assert (column.array[space.all_handles(int(segments[0]))] == number).all()
