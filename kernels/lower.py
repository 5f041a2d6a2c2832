"""Which selected blocks a lower tier has and the top tier has not, and a selection without them."""

from tierstore.kernels.jit import njit
from tierstore.kernels.tables import CHUNK, first_bad_id


@njit
def count_below(chunks, blocks_of, segments, row_ptr, ids, top, below, last_used, step, counts):
    """How many selected blocks of each row are in the lower tier and not in the top one.

    Returns -1, or as `tables.judge` does the negative place of what is wrong with the selection.
    Every selected handle is stamped with `step`.
    """
    bad = first_bad_id(segments, row_ptr, ids, blocks_of)
    if bad != -1:
        return -2 - (bad if bad >= 0 else ids.shape[0])
    for row in range(segments.shape[0]):
        counts[row] = 0
        for i in range(row_ptr[row], row_ptr[row + 1]):
            handle = chunks[segments[row], ids[i] // CHUNK] * CHUNK + ids[i] % CHUNK
            if last_used[handle] == step:
                return -2 - i
            last_used[handle] = step
            if top[handle] < 0 and below[handle] >= 0:
                counts[row] += 1
    return -1


@njit
def split(chunks, segments, row_ptr, ids, stays, top, below, valid_of,
          below_ptr, handles, slots, valid, rest_ptr, rest):  # fmt: skip
    """Those that stay in the lower tier, and places in the selection of all others.

    stays: bool [R], rows whose blocks stay. Returns how many stay, and how many do not.
    """
    here = 0
    other = 0
    below_ptr[0] = 0
    rest_ptr[0] = 0
    for row in range(segments.shape[0]):
        for i in range(row_ptr[row], row_ptr[row + 1]):
            handle = chunks[segments[row], ids[i] // CHUNK] * CHUNK + ids[i] % CHUNK
            if stays[row] and top[handle] < 0 and below[handle] >= 0:
                handles[here] = handle
                slots[here] = below[handle]
                valid[here] = valid_of[handle]
                here += 1
            else:
                rest[other] = i
                other += 1
        below_ptr[row + 1] = here
        rest_ptr[row + 1] = other
    return here, other
