"""Where blocks start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.placement import assign_homes


@pytest.mark.parametrize(
    ("room", "homes"),
    [
        ([1, 2], [1, 2, 0, 1, 2]),
        ([0, 1], [2, 2, 1, 2, 2]),
        ([9, 9], [0, 0, 0, 0, 0]),
        ([2], [1, 1, 0, 0, 1]),
        ([], [0, 0, 0, 0, 0]),
    ],
)
def test_the_most_important_start_in_the_fastest_tier(room: list[int], homes: list[int]) -> None:
    importance = np.array([[0.3, 0.1, 0.9, 0.4, 0.2]], np.float32)
    assert assign_homes(importance, room).tolist() == [homes]


def test_among_equals_the_latest_is_the_most_important() -> None:
    assert assign_homes(np.zeros((2, 4), np.float32), [1, 2]).tolist() == [[2, 1, 1, 0]] * 2


def test_rows_are_ranked_on_their_own() -> None:
    importance = np.array([[1, 2, 3], [30, 20, 10]], np.float32)
    assert assign_homes(importance, [1]).tolist() == [[1, 1, 0], [0, 1, 1]]


def test_rows_may_have_rooms_of_their_own() -> None:
    importance = np.array([[1, 2, 3], [30, 20, 10]], np.float32)
    assert assign_homes(importance, [np.array([2, 0]), 1]).tolist() == [[1, 0, 0], [1, 2, 2]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_has_no_homes(shape: tuple[int, int]) -> None:
    homes = assign_homes(np.zeros(shape, np.float32), [1, 2])
    assert homes.shape == shape
    assert homes.dtype == np.uint8


@given(st.integers(0, 99), st.integers(1, 40), st.lists(st.integers(0, 12), max_size=4))
def test_tiers_are_filled_in_order(seed: int, n: int, room: list[int]) -> None:
    importance = np.random.default_rng(seed).normal(size=(3, n)).astype(np.float32)
    homes = assign_homes(importance, room)
    for row, values in zip(homes.tolist(), importance.tolist(), strict=True):
        order = sorted(range(n), key=lambda block: -values[block])
        expected = [tier for tier, count in enumerate(room) for _ in range(count)]
        expected += [len(room)] * n
        assert [row[block] for block in order] == expected[:n]
