"""Indexes over rows of given keys, and what float64 says about the blocks of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from oracles import Floats, exactly, stored

from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.memory import Memory
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.indexers import ScoringIndex

DIM, BLOCK_TOKENS = 32, 4


def make_index(
    kind: Callable[..., ScoringIndex],
    *,
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    scale: float = DIM**-0.5,
    **options: float | str,
) -> ScoringIndex:
    """An index without rows."""
    memory = Memory(1 << 26)
    shape = IndexShape(group, DIM, dtype, BLOCK_TOKENS, scale, memory, Scratch(memory))
    return kind(shape, **options)


def add_rows(index: ScoringIndex, keys: Sequence[torch.Tensor]) -> ScoringIndex:
    """One more row for each tensor [n, d] of keys; the lengths may differ."""
    first = len(index.segments)
    index.add_rows(np.arange(first, first + len(keys), dtype=np.int32))
    for row, own in enumerate(keys, first):
        extend(index, slice(row, row + 1), own[None])
    return index


def extend(index: ScoringIndex, rows: slice, keys: torch.Tensor) -> None:
    """Append keys [R', n, d] to some rows. The values are of no interest to these indexes."""
    keys = keys.to(index.shape.dtype)
    index.extend(rows, keys, keys[:, :, :1], IndexContext())


def select(
    index: ScoringIndex, query: torch.Tensor, budgets: Sequence[int]
) -> list[tuple[list[int], list[float]]]:
    """Ids and scores of each row for queries [R, G, d]."""
    selection = index.select(stored(query, index.shape.dtype), np.array(budgets, np.int32))
    cuts = selection.row_ptr[1:-1]
    pairs = zip(np.split(selection.ids, cuts), np.split(selection.scores, cuts), strict=True)
    return [(ids.tolist(), scores.tolist()) for ids, scores in pairs]


def rounded(values: torch.Tensor, dtype: torch.dtype) -> Floats:
    """What is left of `values` in elements of `dtype`."""
    return exactly(stored(values, dtype), dtype)


def block_masses(query: Floats, keys: Floats, scale: float) -> Floats:
    """Attention mass [blocks] of each block, summed over its tokens and over the query heads."""
    logits = query @ keys.T * scale
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    masses: Floats = weights.sum(0).reshape(-1, BLOCK_TOKENS).sum(1)
    return masses


def assert_best(ids: Sequence[int], scores: Floats, budget: int, *, tolerance: float) -> None:
    """As many ids as there may be, and no other block scores more than the worst of them."""
    assert len(ids) == len(set(ids)) == min(budget, len(scores))
    others = np.delete(scores, ids)
    if len(ids) and len(others):
        assert others.max() <= scores[list(ids)].min() + tolerance
