"""Product-quantised keys: packed codes, logits by table lookup."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.lookup import permuting_bits, split_codes, sum_of_lookups
from tierstore.kernels.cpu.parts import known
from tierstore.kernels.cpu.scalar import FAST, widen

LANES = 64
"""Tokens whose codes are stored together, a word for each bit of them."""

_LARGEST = np.float32(1e30)


@njit(cache=True, nogil=True)
def _pack_some(codes, start, stop, first, packed):
    """Codes of some tokens of one row, bit by bit, into groups that have others too."""
    one = np.int64(1)
    for i in range(start, stop):
        group, lane = divmod(first + i, LANES)
        flag = one << np.int64(lane)
        for part in range(codes.shape[1]):
            code = codes[i, part]
            for bit in range(packed.shape[2]):
                if (code >> bit) & 1:
                    packed[group, part, bit] |= flag
                else:
                    packed[group, part, bit] &= ~flag


@lru_cache(maxsize=16)
def pack_kernel(bits):
    """Codes of so many bits into words; see `tierstore.kernels.pack_codes` for the contract."""

    @njit(cache=True, nogil=True)
    def pack(codes, first, packed):
        own = np.empty(LANES, np.uint8)
        words = np.empty(bits, np.int64)
        n, parts = codes.shape[1], codes.shape[2]
        start = min(n, -first % LANES)
        groups = (n - start) // LANES
        for row in range(codes.shape[0]):
            _pack_some(codes[row], 0, start, first, packed[row])
            for group in range(groups):
                tokens = codes[row, start + group * LANES : start + (group + 1) * LANES]
                target = packed[row, (first + start) // LANES + group]
                for part in range(parts):
                    for lane in range(LANES):
                        own[lane] = tokens[lane, part]
                    split_codes(own.ctypes.data, words.ctypes.data, bits)
                    for bit in range(bits):
                        target[part, bit] = words[bit]
            _pack_some(codes[row], start + groups * LANES, n, first, packed[row])

    return pack


@njit(cache=True, nogil=True, fastmath=FAST)
def _fill_tables(query, codewords, row, width, scale, sums, tables, steps, lows):
    """Tables of one row in bytes: entry = low of its part + step of its query * byte."""
    heads, parts, entries = tables.shape[0], tables.shape[1], codewords.shape[2]
    for g in range(heads):
        low = np.float32(0.0)
        span = np.float32(0.0)
        for part in range(parts):
            least = _LARGEST
            most = -_LARGEST
            for c in range(entries):
                a = np.float32(0.0)
                for j in range(width):
                    a += widen(query[row, g, part * width + j]) * widen(codewords[row, part, c, j])
                a = max(-_LARGEST, min(_LARGEST, a * scale))
                sums[part, c] = a
                least = min(least, a)
                most = max(most, a)
            for c in range(entries):
                sums[part, c] -= least
            low += least
            span = max(span, most - least)
        steps[g] = span / np.float32(255.0)
        lows[g] = low
        inverse = np.float32(255.0) / span if span > 0 else np.float32(0.0)
        for part in range(parts):
            for c in range(entries):
                tables[g, part, c] = np.uint8(sums[part, c] * inverse + np.float32(0.5))


@lru_cache(maxsize=64)
def lookup_kernel(group, parts, bits, width, permutes=None):
    """Logits for one shape; see `tierstore.kernels.pq_logits`.

    permutes: bits of the registers whose bytes are permuted to look up, 0 for plain loops; by
    default what the processor has.
    """
    entries = max(LANES, 1 << bits)
    if permutes is None:
        permutes = permuting_bits() if bits <= 6 else 0
    if permutes:
        scan = _permuting_scan(group, parts, bits, permutes)
    else:
        scan = _plain_scan(group, parts, bits)

    @njit(cache=True, nogil=True)
    def lookup(query, codewords, codes, first_row, last_row, counts, scale, out):
        sums = np.empty((parts, codewords.shape[2]), np.float32)
        tables = np.zeros((group, parts, entries), np.uint8)
        steps = np.empty(group, np.float32)
        lows = np.empty(group, np.float32)
        for row in range(first_row, last_row):
            _fill_tables(query, codewords, row, width, scale, sums, tables, steps, lows)
            scan(codes, row, (counts[row] + LANES - 1) // LANES, tables, steps, lows, out)

    return lookup


def _permuting_scan(group, parts, bits, registers):
    @njit(cache=True, nogil=True)
    def scan(codes, row, groups, tables, steps, lows, out):
        for i in range(groups):
            sum_of_lookups(
                codes.ctypes.data + row * codes.strides[0] + i * codes.strides[1],
                tables.ctypes.data,
                steps.ctypes.data,
                lows.ctypes.data,
                out.ctypes.data + row * out.strides[0] + i * LANES * 4,
                out.strides[1],
                group,
                parts,
                bits,
                registers,
            )

    return known(scan)


def _plain_scan(group, parts, bits):
    @njit(cache=True, nogil=True)
    def scan(codes, row, groups, tables, steps, lows, out):
        sums = np.empty((group, LANES), np.uint16)
        chosen = np.empty(LANES, np.int64)
        for i in range(groups):
            sums[:] = 0
            for part in range(parts):
                chosen[:] = 0
                for bit in range(bits):
                    word = codes[row, i, part, bit]
                    for lane in range(LANES):
                        chosen[lane] |= ((word >> lane) & 1) << bit
                for g in range(group):
                    for lane in range(LANES):
                        sums[g, lane] += tables[g, part, chosen[lane]]
            for g in range(group):
                for lane in range(LANES):
                    out[row, g, i * LANES + lane] = np.float32(sums[g, lane]) * steps[g] + lows[g]

    return known(scan)
