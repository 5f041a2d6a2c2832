"""The operations that choose their backend by where their arrays live."""

from __future__ import annotations

import numpy as np

from tierstore.kernels import reference
from tierstore.kernels.element import Array, is_host
from tierstore.kernels.shape import BlockShape
from tierstore.kernels.threads import over_rows

try:
    from tierstore.kernels import cpu
except ImportError:  # Numba has no build for every Python; plain torch then serves the CPU too.
    cpu = None  # type: ignore[assignment]

__all__ = [
    "BlockShape",
    "attend_blocks",
    "backend_of",
    "score_units",
    "select_blocks",
    "weigh_strips",
]


def backend_of(array: Array) -> str:
    """The name of the backend that runs operations on `array`: ``numba`` or ``torch``."""
    return "numba" if cpu is not None and is_host(array) else "torch"


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
    if backend_of(pool) == "torch":
        reference.attend_blocks(query, pool, shape, row_ptr, slots, valid, strip_key, strip_value,
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


def score_units(
    query: Array,
    units: Array,
    counts: Array,
    sizes: Array,
    beside: Array,
    scale: float,
    aggregate: str,
    out: Array,
    logits: Array,
) -> None:
    """Log attention mass of one average token of each unit, combined over the queries of its row.

    Per query head the logits are normalised over the row's units, each counted `sizes` times, and
    what is attended beside them; heads are then combined by ``"sum"`` (log of the summed mass) or
    ``"max"``. A unit of size 0 is empty: -inf.

    Parameters
    ----------
    query: [R, G, d] elements. units: [R, u, d] elements. counts: int32 [R] units in use.
    sizes: float32 [R, u] tokens a unit stands for.
    beside: float32 [R, G] log-sum-exp of the logits of the tokens of no unit; -inf for none.
    out, logits: float32 [R, u]; float32 work space [R, G, u].
    """
    if backend_of(units) == "torch":
        reference.score_units(query, units, counts, sizes, beside, scale, aggregate, out)
        return
    kernel = cpu.score_kernel(query.shape[1], query.shape[2])
    over_rows(
        query.shape[0],
        int(counts.sum()) * query.shape[1] * query.shape[2],
        lambda first, last: kernel(query, units, first, last, counts, sizes, beside,
                                   np.float32(scale), aggregate == "max", out, logits),
    )  # fmt: skip


def weigh_strips(
    query: Array, strip_key: Array, strip_length: Array, scale: float, out: Array
) -> None:
    """Log-sum-exp of the logits of each row's strip, for each of its queries; -inf if it is empty.

    Parameters
    ----------
    query: [R, G, d] elements. strip_key, strip_length: [R, s, d] elements; int32 [R] keys in use.
    out: float32 [R, G].
    """
    if backend_of(strip_key) == "torch":
        reference.weigh_strips(query, strip_key, strip_length, scale, out)
        return
    kernel = cpu.weigh_kernel(query.shape[1], query.shape[2])
    kernel(query, strip_key, strip_length, np.float32(scale), out)


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
        int32 [R, b], which lists the blocks unit by unit. Tables of one row serve all rows.
    budgets: int32 [R] blocks wanted. order: int32 [u] work space.
    row_ptr, ids, out_scores: int64 [R + 1]; int32 and float32 [sum of budgets].

    Returns
    -------
    The number of ids written, ``row_ptr[-1]``.
    """
    if backend_of(scores) == "torch":
        return reference.select_blocks(
            scores, counts, costs, unit_ptr, unit_blocks, budgets, row_ptr, ids, out_scores
        )
    return int(
        cpu.select(
            scores, counts, costs, unit_ptr, unit_blocks, budgets, order, row_ptr, ids, out_scores
        )
    )
