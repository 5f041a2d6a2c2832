"""Score every unit of an index against its row's queries, and pick the best within a budget."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive, widen


@lru_cache(maxsize=64)
def score_kernel(group, dim):
    """The scoring kernel for one shape; see `tierstore.kernels.score_units` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def score(query, units, first_row, last_row, counts, sizes, beside, scale, take_max, out,
              logits):  # fmt: skip
        q = np.empty((group, dim), np.float32)
        u = np.empty(dim, np.float32)
        minus_infinity = np.float32(-np.inf)
        for row in range(first_row, last_row):
            n = counts[row]
            s = logits[row]
            for g in range(group):
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            for i in range(n):
                for j in range(dim):
                    u[j] = widen(units[row, i, j])
                for g in range(group):
                    a = np.float32(0.0)
                    for j in range(dim):
                        a += u[j] * q[g, j]
                    s[g, i] = a
            for g in range(group):
                peak = beside[row, g]
                for i in range(n):
                    if sizes[row, i] > 0:
                        peak = max(peak, s[g, i])
                total = exp_nonpositive(beside[row, g] - peak)
                for i in range(n):
                    if sizes[row, i] > 0:
                        total += exp_nonpositive(s[g, i] - peak) * sizes[row, i]
                norm = peak + np.log(total)
                for i in range(n):
                    s[g, i] -= norm
            for i in range(n):
                best = s[0, i]
                for g in range(1, group):
                    best = max(best, s[g, i])
                if not take_max:
                    total = np.float32(0.0)
                    for g in range(group):
                        total += exp_nonpositive(s[g, i] - best)
                    best += np.log(total)
                out[row, i] = best if sizes[row, i] > 0 else minus_infinity

    return score


@lru_cache(maxsize=64)
def weigh_kernel(group, dim):
    """The kernel for one shape; see `tierstore.kernels.weigh_strips` for the contract."""

    @njit(cache=True, nogil=True, fastmath=FAST)
    def weigh(query, strip_key, strip_length, scale, out):
        q = np.empty((group, dim), np.float32)
        key = np.empty(dim, np.float32)
        logits = np.empty((group, strip_key.shape[1]), np.float32)
        for row in range(query.shape[0]):
            n = strip_length[row]
            for g in range(group):
                for j in range(dim):
                    q[g, j] = widen(query[row, g, j]) * scale
            for i in range(n):
                for j in range(dim):
                    key[j] = widen(strip_key[row, i, j])
                for g in range(group):
                    a = np.float32(0.0)
                    for j in range(dim):
                        a += key[j] * q[g, j]
                    logits[g, i] = a
            for g in range(group):
                peak = np.float32(-np.inf)
                for i in range(n):
                    peak = max(peak, logits[g, i])
                total = np.float32(0.0)
                for i in range(n):
                    total += exp_nonpositive(logits[g, i] - peak)
                out[row, g] = peak + np.log(total) if n > 0 else peak

    return weigh


@njit(cache=True, nogil=True)
def _threshold(scores, costs, order, n, budget):
    """The largest v such that units scoring >= v cost at least `budget` (quickselect)."""
    for i in range(n):
        order[i] = i
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
            cut = _threshold(scores[row], costs[table], order, n, budget)
            for ties in range(2):
                for unit in range(n):
                    score = scores[row, unit]
                    if (ties == 0 and score <= cut) or (ties == 1 and score != cut):
                        continue
                    for i in range(
                        unit_ptr[table, unit], unit_ptr[table, unit] + costs[table, unit]
                    ):
                        if at < stop:
                            ids[at] = unit_blocks[table, i]
                            out_scores[at] = score
                            at += 1
        row_ptr[row + 1] = at
    return at
