"""Pick the best units of each row within its budget."""

import numpy as np
from numba import njit

from tierstore.kernels.cpu.flags import NUMBERS, flags_not_below, lowest_flag
from tierstore.kernels.cpu.scalar import from_ordered, ordered

_SAMPLE = 64
"""Of so many units one tells where the cut may be."""

_MANY = 32 * _SAMPLE
"""Fewer units are searched without a sample."""


@njit(cache=True, nogil=True)
def _threshold(scores, costs, order, n, budget, keys, weights):
    """The largest v such that the `n` units of `order` scoring >= v cost at least `budget`.

    The lowest score where all cost less. Halves the range of integers that are ordered as scores
    are: a sum for each of their bits takes a 20th of the time of a quickselect, whose branches
    nothing predicts. What is no number counts as infinite. keys, weights: int32 [n] work space.
    """
    infinite = np.float32(np.inf)
    low = high = ordered(infinite)
    for i in range(n):
        score = scores[order[i]]
        keys[i] = ordered(score if score == score else infinite)
        weights[i] = costs[order[i]]
        low = min(low, keys[i])
    least, beyond = np.int64(low), np.int64(high) + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        cost = np.int32(0)
        for i in range(n):
            cost = np.int32(cost + (weights[i] if keys[i] >= np.int32(middle) else np.int32(0)))
        if cost >= budget:
            least = middle
        else:
            beyond = middle
    return from_ordered(np.int32(least))


@njit(cache=True, nogil=True)
def _reaching(scores, costs, floor, order):
    """Fill `order` with the units that do not score below `floor`; their number and cost.

    Scores that are no numbers count: their logits were beyond float32.
    """
    count = 0
    whole = scores.shape[0] - scores.shape[0] % NUMBERS
    for first in range(0, whole, NUMBERS):
        flags = flags_not_below(scores.ctypes.data + first * 4, floor)
        while flags != 0:
            order[count] = first + lowest_flag(flags)
            count += 1
            flags &= flags - 1
    for unit in range(whole, scores.shape[0]):
        if not scores[unit] < floor:
            order[count] = unit
            count += 1
    cost = 0
    for i in range(count):
        cost += costs[order[i]]
    return count, cost


@njit(cache=True, nogil=True)
def _cut(scores, costs, order, budget, keys, weights):
    """The largest v such that units scoring >= v cost at least `budget`.

    Where there are many units, a sample tells of a score that few reach; the rest is not searched.
    """
    n = scores.shape[0]
    if n >= _MANY:
        sampled = n // _SAMPLE
        for i in range(sampled):
            order[i] = i * _SAMPLE
        share = budget / _SAMPLE
        # Three standard deviations more than the sample should have.
        wanted = int(share + 3.0 * np.sqrt(share) + 3.0)
        floor = _threshold(scores, costs, order, sampled, wanted, keys, weights)
        count, cost = _reaching(scores, costs, floor, order)
        if cost >= budget:
            return _threshold(scores, costs, order, count, budget, keys, weights)
    for i in range(n):
        order[i] = i
    return _threshold(scores, costs, order, n, budget, keys, weights)


@njit(cache=True, nogil=True)
def select(scores, counts, costs, unit_ptr, unit_blocks, budgets, order, row_ptr, ids, out_scores):
    """Fill `ids` with the blocks of the best units of each row; see `kernels.select_blocks`."""
    keys, weights = np.empty(order.shape[0], np.int32), np.empty(order.shape[0], np.int32)
    row_ptr[0] = 0
    at = 0
    for row in range(counts.shape[0]):
        budget = budgets[row]
        stop = at + budget
        n = counts[row]
        table = min(row, costs.shape[0] - 1)
        if budget > 0 and n > 0:
            own, cost, start = scores[row, :n], costs[table], unit_ptr[table]
            cut = _cut(own, cost, order, budget, keys, weights)
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
