"""The operations that choose their backend by where their arrays live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.kernels import reference
from tierstore.kernels.backend import backend_of, cpu, elsewhere
from tierstore.kernels.shape import BlockShape
from tierstore.kernels.threads import over_rows

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

__all__ = [
    "BlockShape",
    "attend_blocks",
    "attend_low_rank",
    "box_logits",
    "combine_heads",
    "dot_logits",
    "pool_pages",
    "select_blocks",
    "weigh_strips",
]


def _numbers(array: Array) -> Array:
    """Integers as int32: as tensors, those of 16 bits would be taken for elements."""
    return array if array.dtype.itemsize > 2 else array.astype(np.int32)


def attend_blocks(
    query: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    slots: Array,
    valid: Array,
    strip_key: Array,
    strip_value: Array,
    strip_length: Array,
    scale: float,
    out: Array,
    lse: Array,
    weights: Array,
    *,
    merge: bool = False,
) -> None:
    """Attention of each row's queries over its blocks and its strip, exact over exactly that set.

    Parameters
    ----------
    query: [R, G, d] elements.
    pool: [slots, elements] the tier's memory; block i of row r is ``pool[slots[row_ptr[r] + i]]``.
    shape: where keys and values stand in a block.
    row_ptr, slots, valid: int64 [R + 1]; int32 [n]; uint8 [n] tokens of the block that count. The
        places behind them hold any finite numbers.
    strip_key, strip_value, strip_length: [R, s, d], [R, s, e] elements; int32 [R] tokens in use.
    out, lse: [R, G, e] elements (float32 when merging); float32 [R, G] natural log-sum-exp.
    weights: float32 work space [R, G, at least tokens in the row].
    merge: combine with what `out` and `lse` already hold (another disjoint key set).
    """
    if (backend := elsewhere(pool)) is not None:
        backend.attend_blocks(query, pool, shape, row_ptr, slots, valid, strip_key, strip_value,
                                strip_length, scale, out, lse, merge=merge)  # fmt: skip
        return
    kernel = cpu.attend_kernel(
        query.shape[1], shape.tokens, shape.key_dim, shape.value_dim, shape.value_offset
    )
    over_rows(
        query.shape[0],
        slots.shape[0] * shape.tokens * shape.key_dim * query.shape[1],
        lambda first, last: kernel(query, pool, first, last, row_ptr, slots, valid, strip_key,
                                   strip_value, strip_length, np.float32(scale), merge, out, lse,
                                   weights),
    )  # fmt: skip


def attend_low_rank(
    query: Array,
    left: Array,
    right: Array,
    cos: Array,
    sin: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    blocks: Array,
    slots: Array,
    valid: Array,
    scale: float,
    out: Array,
    lse: Array,
    weights: Array,
    *,
    merge: bool = False,
) -> None:
    """Attention of each row over blocks whose keys are rebuilt and whose values are exact.

    The key of token t in row r is ``left[r // H, t] @ right[r]``, H the rows of a sequence, turned
    to its position by ``cos[t]`` and ``sin[t]`` (ShadowKV).

    Parameters
    ----------
    query: [R, G, d] elements.
    left, right: [sequences, n, k] and [R, k, d] elements.
    cos, sin: float32 [n, h] of the tokens' positions, as `tierstore.kernels.rotary` takes them;
        h = 0 for keys that need no turning.
    pool, shape: the values' tier, and where values stand in a block; the keys there are not read.
    row_ptr, blocks, slots, valid: int64 [R + 1]; int32 [m] numbers of the blocks, which say what
        tokens they hold; int32 [m]; uint8 [m].
    out, lse, weights, merge: as for `attend_blocks`; weights needs no room for strips.
    """
    if backend_of(pool) != "numba":
        reference.attend_low_rank(query, left, right, cos, sin, pool, shape, row_ptr, blocks,
                                  slots, valid, scale, out, lse, merge=merge)  # fmt: skip
        return
    rank = left.shape[2]
    kernel = cpu.low_rank_kernel(query.shape[1], shape, rank, cos.shape[1])
    over_rows(
        query.shape[0],
        blocks.shape[0] * shape.tokens * shape.key_dim * (rank + query.shape[1]),
        lambda first, last: kernel(query, left, right, cos, sin, pool, first, last, row_ptr, blocks,
                                   slots, valid, np.float32(scale), merge, out, lse, weights),
    )  # fmt: skip


def box_logits(
    query: Array, high: Array, low: Array, counts: Array, scale: float, out: Array
) -> None:
    """Scaled ``sum_i max(q_i * high_i, q_i * low_i)`` of every query with every box of its row.

    No key within a box has a larger dot product with the query.

    Parameters
    ----------
    query: [R, G, d] elements. high, low: [R, u, d] elements, high >= low. counts: int32 [R].
    scale: positive. out: float32 [R, G, u]; places behind a row's units are left as they are.
    """
    if (backend := elsewhere(high)) is not None:
        backend.box_logits(query, high, low, counts, scale, out)
        return
    kernel = cpu.box_kernel(query.shape[1], query.shape[2])
    over_rows(
        query.shape[0],
        2 * int(counts.sum()) * query.shape[1] * query.shape[2],
        lambda first, last: kernel(query, high, low, first, last, counts, np.float32(scale), out),
    )


def dot_logits(query: Array, units: Array, counts: Array, scale: float, out: Array) -> None:
    """Scaled dot products of every query of a row with every unit of the row.

    Parameters
    ----------
    query: [R, G, d] elements. units: [R, u, d] elements. counts: int32 [R] units in use.
    out: float32 [R, G, u]; places behind a row's units are left as they are.
    """
    if (backend := elsewhere(units)) is not None:
        backend.dot_logits(query, units, counts, scale, out)
        return
    kernel = cpu.dot_kernel(query.shape[1], query.shape[2])
    over_rows(
        query.shape[0],
        int(counts.sum()) * query.shape[1] * query.shape[2],
        lambda first, last: kernel(query, units, first, last, counts, np.float32(scale), out),
    )


def combine_heads(
    logits: Array,
    counts: Array,
    sizes: Array | None,
    unit_tokens: float,
    beside: Array | None,
    aggregate: str,
    softmax: bool,
    heads: int,
    out: Array,
) -> None:
    """One score for each unit of a row from the logits of the row's queries.

    With `softmax`, a head's logits first become the log mass of one average token of each unit,
    normalised over the row's units, each counted as often as it has tokens, and what is attended
    beside them; masses are then summed (``"sum"``), averaged or compared. Without, ``"sum"`` and
    the means are of the logits. A unit of size 0 is empty: -inf. Scores of ``"per_query"`` are
    ``-log(1 + best rank of the unit in any head)``.

    Parameters
    ----------
    logits: float32 [R, G, u]; overwritten. counts: int32 [R] units in use.
    sizes: float32 [R, u] tokens that a unit stands for; None where all stand for `unit_tokens`.
    beside: float32 [R, G] log-sum-exp of the logits of tokens of no unit; None for no such tokens.
    aggregate: ``"sum"``, ``"max"``, ``"mean_group"``, ``"mean_all"`` or ``"per_query"``.
    heads: rows of a sequence, which ``"mean_all"`` averages over; they have equally many units.
    out: float32 [R, u]; places behind a row's units are left as they are, but for ``"mean_all"``.
    """
    if (backend := elsewhere(logits)) is not None:
        backend.combine_heads(
            logits, counts, sizes, unit_tokens, beside, aggregate, softmax, heads, out
        )
        return
    within = "mean_group" if aggregate == "mean_all" else aggregate
    if within == "per_query":
        kernel = cpu.rank_heads
    else:
        kernel = cpu.combine_kernel(logits.shape[1], within, softmax, sizes is not None)
    weights = cpu.NO_SIZES if sizes is None else sizes
    others = cpu.NO_SIZES if beside is None else beside
    over_rows(
        logits.shape[0],
        int(counts.sum()) * logits.shape[1] * 8,
        lambda first, last: kernel(logits, first, last, counts, weights, np.float32(unit_tokens),
                                   others, out),
    )  # fmt: skip
    if aggregate == "mean_all" and heads > 1:
        reference.mean_over_rows(out, softmax, heads)


def weigh_strips(
    query: Array, strip_key: Array, strip_length: Array, scale: float, out: Array
) -> None:
    """Log-sum-exp of the logits of each row's strip, for each of its queries; -inf if it is empty.

    Parameters
    ----------
    query: [R, G, d] elements. strip_key, strip_length: [R, s, d] elements; int32 [R] keys in use.
    out: float32 [R, G].
    """
    if backend_of(strip_key) != "numba":
        reference.weigh_strips(query, strip_key, strip_length, scale, out)
        return
    kernel = cpu.weigh_kernel(query.shape[1], query.shape[2])
    kernel(query, strip_key, strip_length, np.float32(scale), out)


def pool_pages(
    scores: Array,
    unit_of: Array | None,
    kept: Array | None,
    blocks: Array,
    pages_per_block: int,
    softmax: bool,
    out: Array,
) -> None:
    """Scores of blocks from those of their pages: log masses add up, of logits the best counts.

    Parameters
    ----------
    scores: float32 [R, u]. unit_of: int32 or int16 [R, pages], the unit of each page; None for
        itself.
    kept: bool [R, b], blocks that must come first: they get the row's best score plus 1.
    blocks: int32 [R]. out: float32 [R, b]; places behind a row's blocks are left as they are.
    """
    if (backend := elsewhere(scores)) is not None:
        units = None if unit_of is None else _numbers(unit_of)
        backend.pool_pages(scores, units, kept, blocks, pages_per_block, softmax, out)
        return
    of = cpu.NO_UNITS if unit_of is None else unit_of
    keep = cpu.NO_FLAGS if kept is None else kept
    kernel = cpu.pool_kernel(pages_per_block)
    over_rows(
        len(blocks),
        int(blocks.sum()) * pages_per_block * 8,
        lambda first, last: kernel(scores, of, keep, first, last, blocks, softmax, out),
    )


def select_blocks(
    scores: Array,
    counts: Array,
    costs: Array,
    unit_ptr: Array,
    unit_blocks: Array,
    budgets: Array,
    order: Array,
    row_ptr: Array,
    ids: Array,
    out_scores: Array,
) -> int:
    """The blocks of the best-scored units of each row, the last unit cut so that the budget is met.

    Units above the cut come first, then those at it, each in unit order: equal inputs, equal
        answer.

    Parameters
    ----------
    scores, counts: float32 [R, u]; int32 [R].
    costs, unit_ptr, unit_blocks: int32 [R, u] blocks per unit; int32 [R, u] where they begin in
        int32 [R, b], which lists the blocks unit by unit; all may be int16. Tables of one row serve
        all rows.
    budgets: int32 [R] blocks wanted. order: int32 [u] work space.
    row_ptr, ids, out_scores: int64 [R + 1]; int32 and float32 [sum of budgets].

    Returns
    -------
    The number of ids written, ``row_ptr[-1]``.
    """
    if (backend := elsewhere(scores)) is not None:
        tables = map(_numbers, (costs, unit_ptr, unit_blocks))
        return int(backend.select_blocks(scores, counts, *tables, budgets, row_ptr, ids,
                                           out_scores))  # fmt: skip
    scores = np.ascontiguousarray(scores, np.float32)
    return int(
        cpu.select(
            scores, counts, costs, unit_ptr, unit_blocks, budgets, order, row_ptr, ids, out_scores
        )
    )
