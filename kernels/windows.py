"""Inner loops of window allocation: the knapsack, and how many blocks a window would miss."""

import numpy as np

from tierstore.kernels.jit import njit


@njit
def hulls(costs, losses, hull, items, targets, prices, worth):
    """Steps along the lower convex hull of each item's losses, as far as they fall; their number.

    For each step: item, choice it leads to, cost, and loss saved per cost. hull: work space.
    """
    at = 0
    for item in range(costs.shape[0]):
        n = 1
        hull[0] = 0
        for choice in range(1, costs.shape[1]):
            if losses[item, choice] >= losses[item, hull[n - 1]]:
                continue
            # The last corner goes while the way past it falls at least as steeply.
            while n > 1:
                a, b = hull[n - 2], hull[n - 1]
                before = (losses[item, a] - losses[item, b]) * (
                    costs[item, choice] - costs[item, b]
                )
                after = (losses[item, b] - losses[item, choice]) * (costs[item, b] - costs[item, a])
                if before > after:
                    break
                n -= 1
            hull[n] = choice
            n += 1
        for i in range(1, n):
            a, b = hull[i - 1], hull[i]
            items[at] = item
            targets[at] = b
            prices[at] = costs[item, b] - costs[item, a]
            worth[at] = (losses[item, a] - losses[item, b]) / prices[at]
            at += 1
    return at


@njit
def buy(order, items, targets, prices, room, picks):
    """Take steps in order, each item's without a gap, as far as there is room."""
    stopped = np.zeros(picks.shape[0], np.bool_)
    for step in order:
        item = items[step]
        if stopped[item]:
            continue
        if prices[step] > room:
            stopped[item] = True
            continue
        room -= prices[step]
        picks[item] = targets[step]


@njit
def program(costs, losses, room, picks):
    """The choice of each item that loses least within `room`.

    ``best[c]`` is the least loss of the items so far at a cost of at most c; `chosen` leads back.
    """
    best = np.zeros(room + 1)
    chosen = np.zeros((costs.shape[0], room + 1), np.int16)
    for item in range(costs.shape[0]):
        new = np.full(room + 1, np.inf)
        for choice in range(costs.shape[1]):
            cost = costs[item, choice]
            loss = losses[item, choice]
            for total in range(cost, room + 1):
                if best[total - cost] + loss < new[total]:
                    new[total] = best[total - cost] + loss
                    chosen[item, total] = choice
        best = new
    for item in range(costs.shape[0] - 1, -1, -1):
        picks[item] = chosen[item, room]
        room -= costs[item, picks[item]]


@njit
def count_ages(row_ptr, handles, segment_of_row, warm_up, visits, last, ages):
    """Count how many of its row's steps ago each selected block was selected before.

    segment_of_row: -1 for a row that selects nothing. visits: steps of each segment so far; its
    first `warm_up` do not count. last: the step in which a handle was selected before, from 1 on; 0
    never. ages: [segments, most + 1] counts; the last column takes what is older or new.
    """
    most = ages.shape[1] - 1
    for row in range(row_ptr.shape[0] - 1):
        segment = segment_of_row[row]
        if segment < 0:
            continue
        visits[segment] += 1
        now = visits[segment]
        for i in range(row_ptr[row], row_ptr[row + 1]):
            before = last[handles[i]]
            age = most
            if before > 0:
                age = min(now - before, most)
            last[handles[i]] = now
            if now > warm_up:
                ages[segment, age] += 1


@njit
def expected_misses(ages, steps, sizes, out):
    """Misses in a step at each of `sizes` blocks, per row, by Denning and Schwartz.

    m(t), the blocks of a step that were not selected in the t steps before, is both the misses with
    a memory of t steps and the growth of what such a memory holds, s(t + 1) - s(t). sizes: rising
    along each row.
    """
    most = ages.shape[1] - 1
    for row in range(ages.shape[0]):
        misses = 0.0
        for age in range(most + 1):
            misses += ages[row, age] / steps
        held = 0.0
        memory = 0
        for i in range(sizes.shape[1]):
            while memory < most - 1 and held + misses < sizes[row, i]:
                held += misses
                memory += 1
                misses -= ages[row, memory] / steps
            after = misses
            if memory < most - 1:
                after -= ages[row, memory + 1] / steps
            share = 1.0
            if held + misses > sizes[row, i]:
                share = (sizes[row, i] - held) / misses
            out[row, i] = misses + (after - misses) * share
