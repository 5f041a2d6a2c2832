"""What policies remember of each block from step to step, brought up to date in one pass.

Columns are indexed by handle; see `tierstore.kernels.tables` for how blocks get handles.
"""

import numpy as np

from tierstore.kernels.jit import njit
from tierstore.kernels.tables import CHUNK


@njit
def scores_of_blocks(blocks_of, segments, unit_of, unit_scores, shift, low, high, out):
    """``out[r, b]``: the score of block b's unit in row r, less ``shift[r]``, within low and high.

    NaN for blocks of no unit, and for what is no block.
    """
    for row in range(segments.shape[0]):
        units = unit_of[min(row, unit_of.shape[0] - 1)]
        scores = unit_scores[row]
        own = out[row]
        blocks = min(blocks_of[segments[row]], units.shape[0])
        if _is_counting(units[:blocks]):
            own[:blocks] = scores[:blocks]
        else:
            for block in range(blocks):
                # Unsigned: else each access tests for a negative index first.
                score = scores[np.uint32(max(units[block], 0))]
                own[block] = score if units[block] >= 0 else np.nan
        own[blocks:] = np.nan
        less = shift[row]
        for block in range(blocks):
            score = own[block] - less
            score = low if score < low else score
            own[block] = high if score > high else score


@njit
def _is_counting(units):
    """Whether each block is its own unit; then scores need no gathering."""
    differences = 0
    for block in range(units.shape[0]):
        differences |= units[block] ^ block
    return differences == 0


@njit
def blend(chunks, blocks_of, segments, scores, weight, column):
    """Move ``column`` by the fraction `weight` towards each block's score, where it has one.

    The first score is taken as it is: a block that never had one is at -inf.
    """
    for row in range(segments.shape[0]):
        own = scores[row]
        blocks = min(blocks_of[segments[row]], own.shape[0])
        for first in range(0, blocks, CHUNK):
            base = chunks[segments[row], first // CHUNK] * CHUNK
            new = own[first : min(first + CHUNK, blocks)]
            part = column[base : base + new.shape[0]]
            for i in range(part.shape[0]):
                old = part[i]
                moved = new[i] if old == -np.inf else old + weight * (new[i] - old)
                part[i] = old if np.isnan(new[i]) else moved


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
def count_uses(handles, column):
    """Add 1 to ``column`` for each handle."""
    for i in range(handles.shape[0]):
        column[handles[i]] += 1


@njit
def take(handles, column, out):
    """``out[i] = column[handles[i]]``."""
    for i in range(handles.shape[0]):
        out[i] = column[handles[i]]


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


@njit
def eligible_only(residents, eligible, row_ptr, out, out_ptr):
    """The residents that may leave, and the pointers of their rows; returns how many."""
    at = 0
    out_ptr[0] = 0
    for row in range(row_ptr.shape[0] - 1):
        for i in range(row_ptr[row], row_ptr[row + 1]):
            out[at] = residents[i]
            at += eligible[i]
        out_ptr[row + 1] = at
    return at
