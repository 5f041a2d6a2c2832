"""Solutions of the multiple-choice knapsack against trying everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierstore.errors import ConfigError
from tierstore.policies.knapsack import Choices, exact, exhaustive, greedy


@st.composite
def instances(draw: st.DrawFn) -> tuple[Choices, int]:
    """A few items, with any losses, and a limit that allows something."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    steps = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, 9)))
    steps[:, 0] -= 1
    scale = draw(st.sampled_from([1, 3]))
    losses = draw(hnp.arrays(np.float64, shape, elements=st.integers(-20, 20)))
    choices = Choices(np.cumsum(steps, axis=1) * scale, losses)
    least, most = int(choices.costs[:, 0].sum()), int(choices.costs[:, -1].sum())
    return choices, draw(st.integers(least, most + 3))


@given(instances())
def test_the_exact_solution_loses_as_little_as_any(instance: tuple[Choices, int]) -> None:
    choices, limit = instance
    best = choices.total(exhaustive(choices, limit))
    found = choices.total(exact(choices, limit))
    assert found[1] == best[1]
    assert found[0] <= limit


@given(instances())
def test_greedy_stays_within_the_limit_and_is_never_better_than_the_best(
    instance: tuple[Choices, int],
) -> None:
    choices, limit = instance
    cost, loss = choices.total(greedy(choices, limit))
    assert cost <= limit
    assert choices.total(exact(choices, limit))[1] <= loss <= choices.losses[:, 0].sum()


@given(
    seed=st.integers(0, 2**32 - 1), items=st.integers(1, 40), share=st.floats(0, 1),
)  # fmt: skip
def test_on_convex_losses_greedy_loses_less_than_one_step(
    seed: int, items: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    falls = np.sort(random.exponential(size=(items, 12)) * random.exponential(size=(items, 1)))
    losses = 100 - np.cumsum(falls[:, ::-1], axis=1)
    choices = Choices(np.tile(np.arange(12) * 7, (items, 1)), losses)
    limit = int(share * choices.costs[:, -1].sum())
    best = choices.total(exact(choices, limit))[1]
    assert choices.total(greedy(choices, limit))[1] <= best + 1e-9, "all steps cost the same"


@given(instances())
def test_greedy_loses_less_than_the_largest_step_where_losses_are_convex(
    instance: tuple[Choices, int],
) -> None:
    choices, limit = instance
    slopes = np.sort(-np.abs(np.diff(choices.losses, axis=1)), axis=1)
    falls = slopes * np.diff(choices.costs, axis=1)
    losses = np.concatenate([choices.losses[:, :1], falls], axis=1).cumsum(axis=1)
    convex = Choices(choices.costs, losses)
    best = convex.total(exact(convex, limit))[1]
    largest = float(-falls.min(initial=0))
    assert convex.total(greedy(convex, limit))[1] <= best + largest + 1e-9


def test_a_step_beyond_a_dent_is_found() -> None:
    """Item 0 gains nothing from one unit and much from two: only its hull shows that."""
    choices = Choices(
        np.array([[0, 1, 2], [0, 1, 2]]), np.array([[10.0, 10.0, 0.0], [10.0, 8.0, 7.0]])
    )
    assert greedy(choices, 2).tolist() == [2, 0]
    assert exact(choices, 2).tolist() == [2, 0]
    assert greedy(choices, 3).tolist() == [2, 1]


def test_a_large_instance_is_solved() -> None:
    """The shape of a model with 90 heads at windows from 1 to 8 budgets."""
    random = np.random.default_rng(0)
    losses = random.exponential(size=(90, 1)) / (1 + np.arange(29))[None]
    choices = Choices(np.tile(np.arange(29) * 11 + 44, (90, 1)), losses)
    limit = 90 * 88
    ratio = choices.total(greedy(choices, limit))[1] / choices.total(exact(choices, limit))[1]
    assert 1 <= ratio <= 1.005


@pytest.mark.parametrize("solve", [greedy, exact, exhaustive])
def test_a_limit_below_the_cheapest_is_refused(solve: object) -> None:
    choices = Choices(np.array([[2, 3], [2, 4]]), np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="limit=3: expected at least 4"):
        solve(choices, 3)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("costs", "losses", "reason"),
    [
        ([[0, 1]], [[1.0]], "same"),
        ([], [], "expected the same"),
        ([[1, 1]], [[2.0, 1.0]], "rise"),
        ([[-1, 1]], [[2.0, 1.0]], ">= 0"),
        ([[0, 1]], [[2.0, np.nan]], "finite"),
    ],
)
def test_what_is_no_instance_is_refused(
    costs: list[list[int]], losses: list[list[float]], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Choices(np.array(costs, np.int64), np.array(losses, np.float64))
