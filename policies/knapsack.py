"""The multiple-choice knapsack: one choice for each item, least total loss within a total cost.

Greedy and exact solutions of what KVDrive (K9) asks; H. Kellerer et al., Knapsack Problems (2004),
chapter 11, describes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.kernels import windows

Costs = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float64]
Picks = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Choices:
    """What each item may be given.

    Attributes
    ----------
    costs: int64 [items, choices], at least 0 and rising along each row.
    losses: float64 [items, choices], finite; what is lost with a choice.
    """

    costs: Costs
    losses: Losses

    def __post_init__(self) -> None:
        if self.costs.ndim != 2 or self.costs.shape != self.losses.shape or not self.costs.size:
            raise ConfigError(
                f"costs of shape {self.costs.shape} and losses of shape {self.losses.shape}: "
                "expected the same [items, choices], with at least one of each"
            )
        if self.costs.min() < 0 or (np.diff(self.costs, axis=1) <= 0).any():
            raise ConfigError("costs: expected numbers >= 0 that rise along each row")
        if not np.isfinite(self.losses).all():
            raise ConfigError("losses: expected finite numbers")

    def total(self, picks: Picks) -> tuple[int, float]:
        """Cost and loss of choice ``picks[i]`` for each item i."""
        items = np.arange(len(picks))
        return int(self.costs[items, picks].sum()), float(self.losses[items, picks].sum())

    def _check(self, limit: int) -> None:
        least = int(self.costs[:, 0].sum())
        if limit < least:
            raise ConfigError(
                f"limit={limit}: expected at least {least}, what the cheapest choices cost together"
            )


def greedy(choices: Choices, limit: int) -> Picks:
    """Start at the cheapest choices; buy the step that saves most for its cost, again and again.

    Steps lead along the lower convex hull of each item's losses, so their worth falls, and all of
    them can be sorted at once. Where the next step does not fit, cheaper ones may. At most one
    step's saving is lost to the optimum where losses are convex. O(n log n).
    """
    choices._check(limit)
    picks: Picks = np.zeros(len(choices.costs), np.int64)
    items, targets, costs, worth = _steps(choices.costs, choices.losses)
    order = np.argsort(-worth, kind="stable")
    windows.buy(order, items, targets, costs, limit - int(choices.costs[:, 0].sum()), picks)
    return picks


def exact(choices: Choices, limit: int) -> Picks:
    """The least loss that `limit` allows, by dynamic programming over the cost.

    Costs are counted in their greatest common divisor, g: time and memory are O(items * choices *
    limit / g) and O(items * limit / g).
    """
    choices._check(limit)
    first = choices.costs[:, :1]
    extra = choices.costs - first
    unit = max(1, int(np.gcd.reduce(extra, axis=None)))
    room = min(limit - int(first.sum()), int(extra[:, -1].sum())) // unit
    picks: Picks = np.empty(len(first), np.int64)
    windows.program(extra // unit, choices.losses, room, picks)
    return picks


def exhaustive(choices: Choices, limit: int) -> Picks:
    """The least loss by trying everything: an oracle for a few items."""
    choices._check(limit)
    best: tuple[float, tuple[int, ...]] | None = None
    for picks in product(range(choices.costs.shape[1]), repeat=len(choices.costs)):
        cost, loss = choices.total(np.array(picks, np.int64))
        if cost <= limit and (best is None or loss < best[0]):
            best = loss, picks
    assert best is not None
    return np.array(best[1], np.int64)


def _steps(costs: Costs, losses: Losses) -> tuple[Picks, Picks, Costs, Losses]:
    """Steps along every hull: item, choice it leads to, cost, and loss saved per cost."""
    size = costs.size
    items, targets, prices = (np.empty(size, np.int64) for _ in range(3))
    worth = np.empty(size, np.float64)
    n = windows.hulls(
        costs, losses, np.empty(costs.shape[1], np.int64), items, targets, prices, worth
    )
    return items[:n], targets[:n], prices[:n], worth[:n]
