"""Pick the best units of each row within its budget."""

from numba import njit


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
