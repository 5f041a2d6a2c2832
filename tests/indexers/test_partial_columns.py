"""InfiniGen's columns: turning changes no dot product, and all columns select exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import BLOCK_TOKENS, DIM, add_rows, extend, make_index, select

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.indexers import (
    IndexShape,
    PartialColumnsIndex,
    Rule,
    ScoringIndex,
    skew,
)
from tierstore.interfaces import IndexContext
from tierstore.memory import Memory
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from oracles import Floats

GROUP, ROWS, SCALE = 2, 2, DIM**-0.5


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def built(
    keys: torch.Tensor, queries: torch.Tensor | None, block_tokens: int = 1, **options: object
) -> ScoringIndex:
    """One sequence: keys [R, n, d] and the last queries [R, G, w, d] of its prompt."""
    memory = Memory(1 << 24)
    shape = IndexShape(
        GROUP, DIM, torch.float32, block_tokens, SCALE, memory, Scratch(memory), heads=len(keys)
    )
    index = PartialColumnsIndex(shape, **options)  # type: ignore[arg-type]
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    index.extend(slice(0, len(keys)), keys, keys, IndexContext(0, queries))
    return index


def mean_logits(query: torch.Tensor, keys: torch.Tensor) -> Floats:
    """Logits of tokens [R, n], averaged over the heads of a row."""
    q, k = query.double().numpy(), keys.double().numpy()
    logits: Floats = (np.einsum("rgd,rnd->rgn", q, k) * SCALE).mean(1)
    return logits


@given(st.integers(1, 60), st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
def test_turning_is_orthogonal_and_leaves_dot_products(n: int, size: float, seed: int) -> None:
    """Also with fewer vectors than dimensions."""
    vectors, keys = randn(2, n, DIM, seed=seed) * size, randn(2, 9, DIM, seed=seed + 1)

    turn = skew(vectors)

    torch.testing.assert_close(turn.mT @ turn, torch.eye(DIM).expand(2, -1, -1), atol=1e-5, rtol=0)
    dots = vectors @ keys.mT
    turned = (vectors @ turn) @ (keys @ turn).mT
    torch.testing.assert_close(turned, dots, atol=2e-5 * size * DIM, rtol=0)


def test_turning_gathers_the_queries_in_their_singular_vectors() -> None:
    """Column j of turned vectors has the norm of the j-th singular value, smallest first."""
    vectors = randn(1, 200, DIM, seed=0) * 0.8 ** torch.arange(DIM)

    norms = (vectors @ skew(vectors)).norm(dim=1)[0]

    singular = np.linalg.svd(vectors[0].double().numpy(), compute_uv=False)[::-1]
    np.testing.assert_allclose(norms, singular, rtol=1e-4, atol=1e-4)


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.5, 2.0, 50.0]),
    st.integers(0, 2**32 - 1),
)
def test_all_columns_select_the_exact_threshold_set(
    tokens: int, cap: int, alpha: float, seed: int
) -> None:
    """As many best tokens as meet it on average.

    Counts that rounding errors decide are left out.
    """
    keys = randn(ROWS, tokens, DIM, seed=seed)
    index = built(
        keys, randn(ROWS, GROUP, 9, DIM, seed=seed + 1), ratio=1.0,
        rule=Rule("mean_group", softmax=False, threshold=alpha),
    )  # fmt: skip
    query = 5 * randn(ROWS, GROUP, DIM, seed=seed + 2)

    found = select(index, query, [cap] * ROWS)

    logits = mean_logits(query, keys)
    below = logits.max(1, keepdims=True) - logits
    if (abs(below[below > 0] - alpha) < 1e-3).any():
        return
    count = min(cap, max(1, round(float((below <= alpha).sum(1).mean()))))
    for row, (ids, scores) in enumerate(found):
        assert len(ids) == count
        assert logits[row, ids].min() >= np.sort(logits[row])[-count] - 1e-3
        np.testing.assert_allclose(scores, logits[row, ids], atol=1e-3)


def test_kept_columns_are_those_where_queries_and_keys_are_largest() -> None:
    """Against a float64 SVD of the queries."""
    queries = randn(ROWS, GROUP, 64, DIM, seed=0) * 0.8 ** torch.arange(DIM)
    keys, query = randn(ROWS, 100, DIM, seed=1), randn(ROWS, GROUP, DIM, seed=2)
    index = built(keys, queries, ratio=0.26, rule=Rule("mean_group", softmax=False))
    kept = int(0.26 * DIM)

    found = select(index, query, [100] * ROWS)

    for row, (ids, scores) in enumerate(found):
        q, k = queries[row].double().numpy(), keys[row].double().numpy()
        turn = np.linalg.svd(q.reshape(-1, DIM))[2].T
        weight = abs(q @ turn).mean(1).sum(0) + abs(k @ turn).mean(0)
        columns = np.argsort(-weight)[:kept]
        asked = query[row].double().numpy() @ turn[:, columns]
        expected = (asked @ (k @ turn[:, columns]).T * SCALE).mean(0)
        np.testing.assert_allclose(scores, expected[ids], atol=1e-4)
    assert index.nbytes == ROWS * (100 * 4 * kept + 4 * DIM * kept + 2 * 4)


def test_later_keys_are_turned_as_the_first_were() -> None:
    keys, queries = randn(ROWS, 40, DIM, seed=0), randn(ROWS, GROUP, 9, DIM, seed=1)
    rule = Rule("mean_group", softmax=False)
    pieces = built(keys[:, :24], queries, ratio=1.0, rule=rule)
    pieces.extend(slice(0, 1), keys[:1, 24:], keys[:1, 24:], IndexContext(24))
    pieces.extend(slice(1, 2), keys[1:, 24:], keys[1:, 24:], IndexContext(24))
    query = randn(ROWS, GROUP, DIM, seed=2)

    found = select(pieces, query, [40, 40])

    logits = mean_logits(query, keys)
    for row, (ids, scores) in enumerate(found):
        np.testing.assert_allclose(scores, logits[row, ids], atol=1e-4)


def test_a_block_scores_what_its_best_token_does() -> None:
    keys, query = randn(ROWS, 40, DIM, seed=0), randn(ROWS, GROUP, DIM, seed=2)
    index = built(keys, None, block_tokens=4, ratio=1.0, rule=Rule("mean_group", softmax=False))

    found = select(index, query, [3, 3])

    best = mean_logits(query, keys).reshape(ROWS, 10, 4).max(2)
    for row, (ids, _) in enumerate(found):
        assert sorted(ids) == sorted(np.argsort(-best[row])[:3].tolist())


def test_as_published_it_selects_what_is_within_four_nats() -> None:
    keys = torch.zeros(1, 6 * BLOCK_TOKENS, DIM)
    keys[0, ::BLOCK_TOKENS, 0] = torch.tensor([0, 1, 7, 10, 6.1, 5.9])
    index = add_rows(make_index(PartialColumnsIndex, scale=1.0), list(keys))
    query = torch.zeros(1, 2, DIM)
    query[..., 0] = 1

    [(ids, _)] = select(index, query, [6])

    assert sorted(ids) == [2, 3, 4]


def test_a_state_with_other_columns_is_refused() -> None:
    state = add_rows(make_index(PartialColumnsIndex), [randn(40, DIM, seed=0)]).state()

    with pytest.raises(StoreMismatchError, match="by 16 columns"):
        make_index(PartialColumnsIndex, ratio=0.5).restore(state)


@pytest.mark.parametrize("ratio", [0.0, 1.1])
def test_a_ratio_that_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=f"ratio={ratio}"):
        make_index(PartialColumnsIndex, ratio=ratio)


def test_a_row_can_grow_from_nothing() -> None:
    index = make_index(PartialColumnsIndex, ratio=1.0)
    index.add_rows(np.arange(1, dtype=np.int32))
    for seed in range(3):
        extend(index, slice(0, 1), randn(1, 8, DIM, seed=seed))

    assert len(select(index, 0.01 * randn(1, 2, DIM, seed=3), [6])[0][0]) == 6
