"""A hash index over key fields of packed rows: which row holds a key.

A row is 12 words of 64 bits. Its key is the length in the low 16 bits of word `LENGTH` and the six
words from `FIELD` on; the bytes of its value are the upper half of word `VALUE_BYTES`. The index is
an open-addressing table of row numbers, -1 where empty, with a power of two of entries; linear
probing, and deletion by shifting back, so it has no tombstones. The hash is seeded, so that nobody
outside can choose keys that collide.
"""

import numpy as np

from tierstore.kernels.jit import njit

WORDS = 12
FIELD = 5
FIELD_WORDS = 6
LENGTH = 4
VALUE_BYTES = 3

_LOW = np.uint64(0xFFFF)
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(32)
_STATE = np.uint64(24)
_BYTE = np.uint64(0xFF)


@njit
def _mix(state, word, seed):
    state = (state ^ word) * _PRIME
    state ^= state >> _FOLD
    return (state + seed) * (seed | np.uint64(1))


@njit
def _hash(words, first, length, seed):
    state = _mix(seed, length, seed)
    for i in range(FIELD_WORDS):
        state = _mix(state, words[first + i], seed)
        state ^= state >> _FOLD
    return state


@njit
def _is_key(row, field, length):
    if row[LENGTH] & _LOW != length:
        return False
    for i in range(FIELD_WORDS):
        if row[FIELD + i] != field[i]:
            return False
    return True


@njit
def find(fields, lengths, index, rows, seed, places):
    """The row of each key field, or -1; returns how many were found."""
    mask = np.uint64(index.shape[0] - 1)
    found = 0
    for i in range(fields.shape[0]):
        at = _hash(fields[i], 0, lengths[i], seed) & mask
        places[i] = -1
        while index[at] >= 0:
            if _is_key(rows[index[at]], fields[i], lengths[i]):
                places[i] = index[at]
                found += 1
                break
            at = (at + np.uint64(1)) & mask
    return found


@njit
def visit(fields, lengths, index, rows, seed, cached, used, pins, tick, pin_cached,
          places, sizes, pages):  # fmt: skip
    """Find records and note their use, from `tick` on: place, value bytes, page in memory, or -1.

    Records without a copy are pinned, those with one if `pin_cached`. Returns how many have one.
    """
    find(fields, lengths, index, rows, seed, places)
    hits = 0
    for i in range(places.shape[0]):
        place = places[i]
        sizes[i] = -1
        pages[i] = -1
        if place >= 0:
            used[place] = tick + i
            sizes[i] = rows[place, VALUE_BYTES] >> _FOLD
            pages[i] = cached[place]
            hits += pages[i] >= 0
            if pages[i] < 0 or pin_cached:
                pins[place] += 1
    return hits


@njit
def unpin(places, pins, rows, live, empty):
    """Take one pin from each place; `empty` receives those left without one whose row is not live.

    Returns how many.
    """
    count = 0
    for i in range(places.shape[0]):
        place = places[i]
        pins[place] -= 1
        if pins[place] == 0 and (rows[place, LENGTH] >> _STATE) & _BYTE != live:
            empty[count] = place
            count += 1
    return count


@njit
def insert(places, index, rows, seed):
    """Enter rows whose keys are not in the index yet."""
    mask = np.uint64(index.shape[0] - 1)
    for i in range(places.shape[0]):
        row = rows[places[i]]
        at = _hash(row, FIELD, row[LENGTH] & _LOW, seed) & mask
        while index[at] >= 0:
            at = (at + np.uint64(1)) & mask
        index[at] = places[i]


@njit
def remove(places, index, rows, seed):
    """Take rows out; returns how many were there."""
    mask = np.uint64(index.shape[0] - 1)
    one = np.uint64(1)
    removed = 0
    for i in range(places.shape[0]):
        row = rows[places[i]]
        at = _hash(row, FIELD, row[LENGTH] & _LOW, seed) & mask
        while index[at] >= 0 and index[at] != places[i]:
            at = (at + one) & mask
        if index[at] < 0:
            continue
        removed += 1
        hole = at
        at = (at + one) & mask
        while index[at] >= 0:
            other = rows[index[at]]
            home = _hash(other, FIELD, other[LENGTH] & _LOW, seed) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                index[hole] = index[at]
                hole = at
            at = (at + one) & mask
        index[hole] = -1
    return removed


@njit
def newest(places, index, rows, seed, older):
    """Enter rows of which several may have one key: the highest sequence (word 0) stays.

    `older` receives the rows that lost; returns how many.
    """
    mask = np.uint64(index.shape[0] - 1)
    lost = 0
    for i in range(places.shape[0]):
        row = rows[places[i]]
        length = row[LENGTH] & _LOW
        at = _hash(row, FIELD, length, seed) & mask
        while index[at] >= 0:
            other = rows[index[at]]
            if _is_key(other, row[FIELD : FIELD + FIELD_WORDS], length):
                older[lost] = places[i]
                if row[0] > other[0]:
                    older[lost] = index[at]
                    index[at] = places[i]
                lost += 1
                break
            at = (at + np.uint64(1)) & mask
        else:
            index[at] = places[i]
    return lost


@njit
def to_copy(pages, sizes):
    """The longest of `sizes`, -1 without any, and the sum of those that have a page."""
    longest, nbytes = -1, 0
    for i in range(pages.shape[0]):
        longest = max(longest, sizes[i])
        if pages[i] >= 0:
            nbytes += sizes[i]
    return longest, nbytes


@njit
def copy_out(source, page_bytes, pages, sizes, out, lengths):
    """Copy the `sizes[i]` bytes at each page to the start of ``out[i]``; page -1 is none.

    `lengths` receives the sizes of those copied, -1 for the others. No size may exceed a row.
    """
    for i in range(pages.shape[0]):
        lengths[i] = -1
        if pages[i] >= 0:
            lengths[i] = sizes[i]
            # Numba copies a slice byte by byte; this loop becomes a memcpy.
            row, value = out[i], source[pages[i] * page_bytes :]
            for j in range(sizes[i]):
                row[j] = value[j]


@njit
def fingerprints(fields, lengths, out):
    """A 64-bit hash of each key field, the same in every process."""
    for i in range(fields.shape[0]):
        out[i] = _hash(fields[i], 0, lengths[i], _PRIME)
