"""From the logits of units to scores: over the heads of a row, then over the pages of a block."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.scalar import FAST, exp_nonpositive

NO_SIZES = np.empty((0, 0), np.float32)
NO_UNITS = np.empty((0, 0), np.int32)
NO_FLAGS = np.empty((0, 0), np.bool_)
"""What kernels take for None: one type of argument, one compilation."""

_MINUS_INFINITY = np.float32(-np.inf)


@lru_cache(maxsize=64)
def combine_kernel(group, aggregate, softmax, sized):
    """The combining kernel for one rule; see `tierstore.kernels.combine_heads` for the contract."""
    takes_max = aggregate == "max"
    takes_mean = aggregate == "mean_group"
    adds_masses = softmax and not takes_max

    @njit(cache=True, nogil=True, fastmath=FAST)
    def normalise(s, n, sizes, unit_tokens, beside):
        peak = beside
        for i in range(n):
            if not sized or sizes[i] > 0:
                peak = max(peak, s[i])
        total = np.float32(0.0)
        for i in range(n):
            if not sized:
                total += exp_nonpositive(s[i] - peak)
            elif sizes[i] > 0:
                total += exp_nonpositive(s[i] - peak) * sizes[i]
        others = exp_nonpositive(beside - peak) if beside > _MINUS_INFINITY else np.float32(0.0)
        norm = peak + np.log((total if sized else total * unit_tokens) + others)
        if takes_mean:
            norm += np.log(np.float32(group))
        for i in range(n):
            s[i] -= norm

    @njit(cache=True, nogil=True, fastmath=FAST)
    def combine(logits, first_row, last_row, counts, sizes, unit_tokens, beside, out):
        for row in range(first_row, last_row):
            n = counts[row]
            s = logits[row]
            own = sizes[row] if sized else sizes[:0].reshape(-1)
            if softmax:
                for g in range(group):
                    lse = beside[row, g] if beside.size > 0 else _MINUS_INFINITY
                    normalise(s[g], n, own, unit_tokens, lse)
            for i in range(n):
                best = s[0, i]
                if softmax or takes_max:
                    for g in range(1, group):
                        best = max(best, s[g, i])
                if adds_masses:
                    total = np.float32(0.0)
                    for g in range(group):
                        total += exp_nonpositive(s[g, i] - best)
                    best += np.log(total)
                elif not takes_max:
                    for g in range(1, group):
                        best += s[g, i]
                    if takes_mean:
                        best /= np.float32(group)
                out[row, i] = best
            if sized:
                for i in range(n):
                    if not own[i] > 0:
                        out[row, i] = _MINUS_INFINITY

    return combine


@njit(cache=True, nogil=True)
def rank_heads(logits, first_row, last_row, counts, sizes, unit_tokens, beside, out):
    """Score units by the best rank that any head gives them, ties in unit order."""
    sized = sizes.size > 0
    for row in range(first_row, last_row):
        n = counts[row]
        best = np.full(n, n, np.int64)
        for g in range(logits.shape[1]):
            s = logits[row, g, :n]
            if sized:
                for i in range(n):
                    if not sizes[row, i] > 0:
                        s[i] = _MINUS_INFINITY
            order = np.argsort(-s, kind="mergesort")
            for rank in range(n):
                best[order[rank]] = min(best[order[rank]], rank)
        for i in range(n):
            empty = sized and not sizes[row, i] > 0
            out[row, i] = _MINUS_INFINITY if empty else -np.log1p(np.float32(best[i]))


@njit(cache=True, nogil=True, fastmath=FAST)
def pool(scores, unit_of, kept, first_row, last_row, blocks, pages_per_block, softmax, out):
    """Fill `out` with the scores of blocks; see `tierstore.kernels.pool_pages`."""
    coarse = unit_of.size > 0
    keeps = kept.size > 0
    for row in range(first_row, last_row):
        top = np.float32(-3e38)
        for block in range(blocks[row]):
            first = block * pages_per_block
            best = _MINUS_INFINITY
            for page in range(first, first + pages_per_block):
                best = max(best, scores[row, unit_of[row, page] if coarse else page])
            if softmax and pages_per_block > 1 and best > _MINUS_INFINITY:
                total = np.float32(0.0)
                for page in range(first, first + pages_per_block):
                    s = scores[row, unit_of[row, page] if coarse else page]
                    total += exp_nonpositive(s - best)
                best += np.log(total)
            out[row, block] = best
            top = max(top, best)
        if keeps:
            for block in range(blocks[row]):
                if kept[row, block]:
                    out[row, block] = top + np.float32(1.0)
