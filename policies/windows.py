"""Window allocation: how much of the fast tier, and of the budget, each layer and head gets.

Layers and heads differ in how much a larger window saves them (KVDrive, K9), and in how many blocks
their attention is spread over. Both are knapsacks: for each head a size, the least loss at the same
total.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tierstore.policies.knapsack import Choices, greedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.policies.knapsack import Picks
    from tierstore.policies.profile import Amounts

    Solve = Callable[[Choices, int], Picks]

WINDOWS: Amounts = np.arange(1.0, 8.125, 0.25)
"""Windows that a head may get, in budgets of its own."""

BUDGETS: Amounts = np.arange(0.125, 4.0625, 0.125)
"""Budgets that a head may get, in shares of the mean one."""

_UNIT = 1024
"""Parts of a mean budget that costs are counted in."""


def allocate_windows(
    misses: Amounts, window: float, budgets: Amounts | None = None, solve: Solve = greedy
) -> Amounts:
    """The window of each head that together miss least, in mean budgets.

    Parameters
    ----------
    misses: float64 [heads, len(WINDOWS)], what each head misses in a step with those windows.
    window: their mean, in mean budgets. Where the smallest windows come to more, each head gets
        its smallest: its budget, rounded up to a 1/1024 of a mean one.
    budgets: float64 [heads], the budget of each in mean budgets; 1 by default.
    """
    budgets = np.ones(len(misses)) if budgets is None else budgets
    costs = np.ceil(np.outer(budgets, WINDOWS) * _UNIT - 1e-9).astype(np.int64)
    limit = max(int(costs[:, 0].sum()), _total(window, len(misses)))
    picks = solve(Choices(costs, misses), limit)
    return costs[np.arange(len(picks)), picks] / _UNIT


def pinned_below(
    misses: Amounts, windows: Amounts, below: float, budgets: Amounts, solve: Solve = greedy
) -> Amounts:
    """Blocks of a tier under the fast one for each head, so that least goes past both.

    Parameters
    ----------
    misses: float64 [layers, KV heads, len(WINDOWS)], as `allocate_windows` takes them.
    windows, budgets: float64 [layers, KV heads], what each head has in the fast tier, and its
        budget, in mean budgets.
    below: mean of the blocks in the lower tier, in mean budgets.

    Returns
    -------
    float64 [layers, KV heads], in mean budgets; their mean is at most `below`.
    """
    flat = misses.reshape(-1, misses.shape[-1])
    both = allocate_windows(flat, float(windows.mean()) + below, budgets.ravel(), solve)
    extra = np.maximum(both.reshape(windows.shape) - windows, 0)
    return extra * min(1.0, below / max(float(extra.mean()), 1e-30))


def allocate_budgets(missed: Amounts, solve: Solve = greedy) -> Amounts:
    """The budget of each head that together miss least attention mass; their mean is at most 1.

    missed: float64 [heads, len(BUDGETS)], the mass that each head misses with those budgets.
    """
    costs = np.tile(np.rint(BUDGETS * _UNIT).astype(np.int64), (len(missed), 1))
    picks = solve(Choices(costs, missed), _total(1.0, len(missed)))
    return BUDGETS[picks]


def _total(mean: float, heads: int) -> int:
    return math.floor(mean * heads * _UNIT + 1e-9)
