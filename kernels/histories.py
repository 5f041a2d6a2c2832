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
def remember(chunks, blocks_of, segments, unit_of, unit_scores, shift, low, high, lean, rise, fall,
             means, scores, leaned):  # fmt: skip
    """Bring the column of each of `means` up to date with a step's scores, row by row.

    lean: the part that a block takes of what the block before it scores more. rise, fall: of each
    mean, as in `blend`. scores, leaned: float32 [1, blocks] work space, so small that it stays in
    the processor's cache.
    """
    for row in range(segments.shape[0]):
        mine = slice(row, row + 1)
        table = min(row, unit_of.shape[0] - 1)
        scores_of_blocks(
            blocks_of, segments[mine], unit_of[table : table + 1], unit_scores[mine], shift[mine],
            low, high, scores,
        )  # fmt: skip
        new = scores
        if lean > 0:
            lean_forwards(scores[0], lean, leaned[0])
            new = leaned
        for i in range(len(means)):
            blend(chunks, blocks_of, segments[mine], new, rise[i], fall[i], means[i])


@njit
def lean_forwards(scores, lean, out):
    """``out[b]``: the score of block b, moved by the part `lean` towards a higher one before it."""
    if scores.shape[0] > 0:
        out[0] = scores[0]
    before = scores[:-1]
    own = scores[1:]
    new = out[1:]
    for i in range(own.shape[0]):
        more = before[i] - own[i]
        # False for NaN, the score of what is no block.
        new[i] = own[i] + lean * more if more > 0 else own[i]


@njit
def blend(chunks, blocks_of, segments, scores, rise, fall, column):
    """Move ``column`` towards each block's score, where it has one, up by `rise`, down by `fall`.

    Both are fractions of the way. The first score is taken as it is: a block that never had one is
    at -inf.
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
                way = new[i] - old
                moved = new[i] if old == -np.inf else old + (rise if way > 0 else fall) * way
                part[i] = old if np.isnan(new[i]) else moved


@njit
def age(chunks, blocks_of, segments, decay, most, scale, column):
    """Let what was counted in each of `segments` shrink to the part `decay` of it.

    What was counted is ``column / scale[segment]``: to raise the scale is enough, until it exceeds
    `most`. Then the blocks' own numbers are lowered, and the scale is 1 again.
    """
    for row in range(segments.shape[0]):
        segment = segments[row]
        if scale[segment] <= decay * most:
            scale[segment] /= decay
            continue
        _multiply(chunks, blocks_of, segments[row : row + 1], decay / scale[segment], column)
        scale[segment] = 1


@njit
def _multiply(chunks, blocks_of, segments, factor, column):
    for row in range(segments.shape[0]):
        segment = segments[row]
        blocks = blocks_of[segment]
        for first in range(0, blocks, CHUNK):
            base = chunks[segment, first // CHUNK] * CHUNK
            part = column[base : base + min(CHUNK, blocks - first)]
            for i in range(part.shape[0]):
                part[i] *= factor


@njit
def count_uses(handles, owner_segment, scale, column):
    """Count each handle once more; see `age` for what ``column`` holds."""
    for i in range(handles.shape[0]):
        column[handles[i]] += scale[owner_segment[handles[i] // CHUNK]]


@njit
def uses(handles, owner_segment, scale, column, out):
    """``out[i]``: what was counted of each handle."""
    for i in range(handles.shape[0]):
        out[i] = column[handles[i]] / scale[owner_segment[handles[i] // CHUNK]]


@njit
def stamp(handles, step, column):
    """``column[handle] = step`` for each handle."""
    for i in range(handles.shape[0]):
        column[handles[i]] = step


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
