"""Pick the best units of each row within its budget."""

import numpy as np
from numba import njit

_SAMPLE = 64
"""Of so many units one tells where the cut may be."""

_MANY = 32 * _SAMPLE
"""Fewer units are searched without a sample."""


@njit(cache=True, nogil=True)
def _threshold(scores, costs, order, n, budget):
    """The largest v such that the `n` units of `order` scoring >= v cost at least `budget`.

    Quickselect; the lowest score where all cost less.
    """
    low = 0
    high = n
    while high - low > 1:
        pivot = scores[order[(low + high) // 2]]
        i = low
        above = low
        below = high
        above_cost = 0
        while i < below:
            unit = order[i]
            if scores[unit] > pivot:
                order[i] = order[above]
                order[above] = unit
                above += 1
                i += 1
                above_cost += costs[unit]
            elif scores[unit] < pivot:
                below -= 1
                order[i] = order[below]
                order[below] = unit
            else:
                i += 1
        if above_cost >= budget:
            high = above
            continue
        budget -= above_cost
        equal_cost = 0
        for j in range(above, below):
            equal_cost += costs[order[j]]
        if equal_cost >= budget or below == high:
            return pivot
        budget -= equal_cost
        low = below
    return scores[order[low]]


@njit(cache=True, nogil=True)
def _reaching(scores, costs, floor, order):
    """Fill `order` with the units that do not score below `floor`; their number and cost.

    Scores that are no numbers count: their logits were beyond float32.
    """
    # Unsigned: else each access tests for a negative index first.
    count = np.uint32(0)
    for unit in range(scores.shape[0]):
        # Always written, so that there is no branch to mispredict.
        order[count] = unit
        count += np.uint32(not scores[unit] < floor)
    cost = 0
    for i in range(np.int64(count)):
        cost += costs[order[i]]
    return np.int64(count), cost


@njit(cache=True, nogil=True)
def _cut(scores, costs, order, budget):
    """The largest v such that units scoring >= v cost at least `budget`.

    Where there are many units, a sample tells of a score that few reach; the rest is not sorted.
    """
    n = scores.shape[0]
    if n >= _MANY:
        sampled = n // _SAMPLE
        for i in range(sampled):
            order[i] = i * _SAMPLE
        share = budget / _SAMPLE
        # Three standard deviations more than the sample should have.
        floor = _threshold(scores, costs, order, sampled, int(share + 3.0 * np.sqrt(share) + 3.0))
        count, cost = _reaching(scores, costs, floor, order)
        if cost >= budget:
            return _threshold(scores, costs, order, count, budget)
    for i in range(n):
        order[i] = i
    return _threshold(scores, costs, order, n, budget)


@njit(cache=True, nogil=True)
def select(scores, counts, costs, unit_ptr, unit_blocks, budgets, order, row_ptr, ids, out_scores):
    """Fill `ids` with the blocks of the best units of each row; see `kernels.select_blocks`."""
    row_ptr[0] = 0
    at = 0
    for row in range(counts.shape[0]):
        budget = budgets[row]
        stop = at + budget
        n = counts[row]
        table = min(row, costs.shape[0] - 1)
        if budget > 0 and n > 0:
            own, cost, start = scores[row, :n], costs[table], unit_ptr[table]
            cut = _cut(own, cost, order, budget)
            count, _ = _reaching(own, cost, cut, order)
            for ties in range(2):
                for i in range(count):
                    unit = order[i]
                    if (own[unit] == cut) != (ties == 1):
                        continue
                    for block in range(start[unit], start[unit] + cost[unit]):
                        if at < stop:
                            ids[at] = unit_blocks[table, block]
                            out_scores[at] = own[unit]
                            at += 1
        row_ptr[row + 1] = at
    return at
