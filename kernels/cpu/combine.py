"""From the logits of units to scores: over the heads of a row, then over the pages of a block."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.parts import part
from tierstore.kernels.cpu.scalar import (
    FAST,
    exp_nonpositive,
    from_ordered,
    log_positive,
    ordered,
    widest_vectors,
)

NO_SIZES = np.empty((0, 0), np.float32)
NO_UNITS = np.empty((0, 0), np.int32)
NO_FLAGS = np.empty((0, 0), np.bool_)
"""What kernels take for None: one type of argument, one compilation."""

_MINUS_INFINITY = np.float32(-np.inf)
_LOWEST = np.float32(-3e38)


_CHUNK = 2048
"""Units that are looked at twice while the processor's first cache holds them."""


@lru_cache(maxsize=64)
def _norm_of(sized):
    """The log-sum-exp of one head's logits, each counted as often as its unit has tokens."""

    @part
    def norm_of(s, n, sizes, unit_tokens, beside):
        peak = beside
        total = np.float32(1.0) if beside > _MINUS_INFINITY else np.float32(0.0)
        for first in range(0, n, _CHUNK):
            # Slices: indices that begin at 0 need no test for negative ones.
            own = s[first : min(first + _CHUNK, n)]
            often = sizes[first : min(first + _CHUNK, n)] if sized else own
            most = ordered(_MINUS_INFINITY)
            for i in range(own.shape[0]):
                live = not sized or often[i] > 0
                most = max(most, ordered(own[i] if live else _MINUS_INFINITY))
            top = from_ordered(most)
            if not top <= peak:
                total *= exp_nonpositive(peak - top) if total > 0 else np.float32(1.0)
                peak = top
            more = np.float32(0.0)
            for i in range(own.shape[0]):
                if sized:
                    # An empty unit may be above the peak.
                    more += exp_nonpositive(min(own[i] - peak, np.float32(0.0))) * often[i]
                else:
                    more += exp_nonpositive(own[i] - peak)
            total += more if sized else more * unit_tokens
        return peak + np.log(total)

    return norm_of


@lru_cache(maxsize=64)
def _scores_of(group, takes_max, adds_masses):
    """Scores of units from their logits, or log masses, less what each head's `norms` say."""

    @part
    def scores_of(s, norms, scores):
        for i in range(scores.shape[0]):
            best = s[0, i] - norms[0]
            for g in range(1, group):
                own = s[g, i] - norms[g]
                best = max(best, own) if takes_max or adds_masses else best + own
            if adds_masses:
                total = np.float32(0.0)
                for g in range(group):
                    total += exp_nonpositive(s[g, i] - norms[g] - best)
                best += log_positive(total)
            scores[i] = best

    return scores_of


@lru_cache(maxsize=64)
def combine_kernel(group, aggregate, softmax, sized):
    """The combining kernel for one rule; see `tierstore.kernels.combine_heads` for the contract."""
    takes_mean = aggregate == "mean_group"
    takes_max = aggregate == "max"
    norm_of = _norm_of(sized)
    scores_of = _scores_of(group, takes_max, softmax and not takes_max)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def combine(logits, first_row, last_row, counts, sizes, unit_tokens, beside, out):
        widest_vectors()
        norms = np.zeros(group, np.float32)
        factor = np.float32(1.0) / np.float32(group)
        for row in range(first_row, last_row):
            n, s, scores = counts[row], logits[row], out[row, : counts[row]]
            own = sizes[row] if sized else sizes[:0].reshape(-1)
            if softmax:
                for g in range(group):
                    lse = beside[row, g] if beside.size > 0 else _MINUS_INFINITY
                    norms[g] = norm_of(s[g], n, own, unit_tokens, lse)
                    if takes_mean:
                        norms[g] += np.log(np.float32(group))
            scores_of(s, norms, scores)
            if takes_mean and not softmax:
                for i in range(n):
                    scores[i] *= factor
            if sized:
                for i in range(n):
                    if not own[i] > 0:
                        scores[i] = _MINUS_INFINITY

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


@lru_cache(maxsize=64)
def _pooled(pages):
    """Scores of blocks from those of their pages, block after block."""

    @part
    def pooled(scores, softmax, out):
        for i in range(out.shape[0]):
            best = _MINUS_INFINITY
            for page in range(pages):
                best = max(best, scores[i * pages + page])
            out[i] = best
        if not softmax or pages == 1:
            return
        for i in range(out.shape[0]):
            total = np.float32(0.0)
            for page in range(pages):
                total += exp_nonpositive(scores[i * pages + page] - max(out[i], _LOWEST))
            out[i] += log_positive(total)

    return pooled


@lru_cache(maxsize=64)
def pool_kernel(pages):
    """The kernel for blocks of so many pages; see `tierstore.kernels.pool_pages`."""
    pooled = _pooled(pages)

    @njit(cache=True, nogil=True, fastmath=FAST)
    def pool(scores, unit_of, kept, first_row, last_row, blocks, softmax, out):
        widest_vectors()
        coarse = unit_of.size > 0
        listed = np.empty(_CHUNK * pages, np.float32)
        for row in range(first_row, last_row):
            for first in range(0, blocks[row], _CHUNK):
                own = out[row, first : min(first + _CHUNK, blocks[row])]
                n, start = own.shape[0] * pages, first * pages
                if coarse:
                    units = unit_of[row, start : start + n]
                    for i in range(n):
                        listed[i] = scores[row, units[i]]
                    pooled(listed, softmax, own)
                else:
                    pooled(scores[row, start : start + n], softmax, own)
            if kept.size > 0:
                _raise_kept(out[row, : blocks[row]], kept[row])

    return pool


@part
def _raise_kept(scores, kept):
    """Let what is kept have the best score and 1 more."""
    most = ordered(_LOWEST)
    for i in range(scores.shape[0]):
        most = max(most, ordered(scores[i]))
    for i in range(scores.shape[0]):
        if kept[i]:
            scores[i] = from_ordered(most) + np.float32(1.0)
