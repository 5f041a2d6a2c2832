"""What the estimated zone is chosen from: clusters that nothing was selected of."""

import numpy as np

from tierstore.kernels.jit import njit


@njit
def untaken(scores, counts, unit_of, row_ptr, ids, most, left, wanted):
    """Scores of the clusters of each row that no selected token is in, and how many to take.

    scores, counts: float32 [R, u]; int32 [R] clusters in use, some of which may have the score
        -inf: they are none. unit_of: integers [R, n], the cluster of each token.
    row_ptr, ids: int64 [R + 1]; int32 [m], the tokens that were selected.
    left, wanted: float32 [R, u], -inf for what is taken or none; int32 [R], at most `most`.
    Returns the sum of `wanted`.
    """
    total = 0
    for row in range(scores.shape[0]):
        for unit in range(counts[row]):
            left[row, unit] = scores[row, unit]
        for i in range(row_ptr[row], row_ptr[row + 1]):
            left[row, unit_of[row, ids[i]]] = -np.inf
        there = 0
        for unit in range(counts[row]):
            there += left[row, unit] > -np.inf
        wanted[row] = min(most, there)
        total += wanted[row]
    return total
