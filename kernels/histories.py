"""What policies remember of each block from step to step, brought up to date in one pass.

Columns are indexed by handle; see `tierstore.kernels.tables` for how blocks get handles.
"""

import numpy as np

from tierstore.kernels.jit import njit
from tierstore.kernels.tables import CHUNK


@njit
def blend_scores(chunks, blocks_of, segments, unit_of, unit_scores, shift, low, high, weights,
                 columns):  # fmt: skip
    """Move ``columns[k]`` towards each block's clipped score by the fraction ``weights[k]``.

    Row r's score counts as ``min(max(score - shift[r], low), high)``. The first one is taken as it
    is: a block that never had a score is at -inf. Blocks of no unit, and those that the table does
    not cover, stay as they are.
    """
    found = np.empty(CHUNK, np.float32)
    for row in range(segments.shape[0]):
        segment = segments[row]
        units = unit_of[min(row, unit_of.shape[0] - 1)]
        blocks = min(blocks_of[segment], units.shape[0])
        for first in range(0, blocks, CHUNK):
            base = chunks[segment, first // CHUNK] * CHUNK
            count = min(CHUNK, blocks - first)
            _gather(units[first : first + count], unit_scores[row], shift[row], low, high, found)
            for k in range(len(columns)):
                _blend(found[:count], weights[k], columns[k][base : base + count])


@njit
def _gather(units, scores, shift, low, high, found):
    """Clipped scores; NaN for no unit."""
    for i in range(units.shape[0]):
        # Unsigned: else each access tests for a negative index first.
        score = scores[np.uint32(max(units[i], 0))] - shift
        score = low if score < low else score
        score = high if score > high else score
        found[i] = score if units[i] >= 0 else np.nan


@njit
def _blend(scores, weight, column):
    for i in range(scores.shape[0]):
        old = column[i]
        new = scores[i] if old == -np.inf else old + weight * (scores[i] - old)
        column[i] = old if np.isnan(scores[i]) else new


@njit
def decay(chunks, blocks_of, segments, factor, column):
    """Multiply ``column`` by `factor` for every block of `segments`."""
    for row in range(segments.shape[0]):
        segment = segments[row]
        blocks = blocks_of[segment]
        for first in range(0, blocks, CHUNK):
            base = chunks[segment, first // CHUNK] * CHUNK
            part = column[base : base + min(CHUNK, blocks - first)]
            for i in range(part.shape[0]):
                part[i] *= factor


@njit
def marked(chunks, blocks_of, segments, marks, bit, last_used, step, row_ptr, handles, eligible,
           able):  # fmt: skip
    """Blocks of each segment whose mark has `bit`, which were not used by `step`, and how many.

    Returns the number of handles written.
    """
    at = 0
    row_ptr[0] = 0
    for row in range(segments.shape[0]):
        segment = segments[row]
        blocks = blocks_of[segment]
        able[row] = 0
        for first in range(0, blocks, CHUNK):
            base = chunks[segment, first // CHUNK] * CHUNK
            for handle in range(base, base + min(CHUNK, blocks - first)):
                if marks[handle] & bit:
                    handles[at] = handle
                    eligible[at] = last_used[handle] != step
                    able[row] += eligible[at]
                    at += 1
        row_ptr[row + 1] = at
    return at
