"""What the last queries of a prompt attended to, against float64, and what becomes of the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import BLOCK_TOKENS, DIM, add_rows, assert_best, extend, make_index, select
from oracles import Floats, log_sum_exp

from tierstore.errors import ConfigError
from tierstore.indexers import Rule, ScoringIndex, SnapKVIndex, window_scores
from tierstore.interfaces import IndexContext

SCALE = DIM**-0.5


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def built(keys: torch.Tensor, queries: torch.Tensor, **options: object) -> ScoringIndex:
    """Rows of keys [R, n, d] that queries [R, G, w, d] looked at."""
    index = make_index(SnapKVIndex, group=queries.shape[1], **options)  # type: ignore[arg-type]
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    index.extend(slice(0, len(keys)), keys, keys, IndexContext(0, queries))
    return index


def smoothed(scores: Floats, pool: str, kernel: int) -> Floats:
    """Each place from its neighbours, one after the other; beyond the ends are zeros."""
    half = kernel // 2
    out = np.empty_like(scores)
    for at in range(scores.shape[-1]):
        near = scores[..., max(0, at - half) : at + half + 1]
        out[..., at] = near.sum(-1) / kernel if pool == "avg" else near.max(-1)
    return out


def window_attention(queries: Floats, keys: Floats) -> Floats:
    logits = queries @ keys.T * SCALE
    weights: Floats = np.exp(logits - log_sum_exp(logits, axis=-1)[..., None])
    return weights


@pytest.mark.parametrize("pool", ["avg", "max"])
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 3, 7]), st.integers(0, 2**32 - 1))
def test_scores_are_the_windows_attention_smoothed(
    pool: str, tokens: int, window: int, kernel: int, seed: int
) -> None:
    queries, keys = randn(2, 3, window, DIM, seed=seed) * 2, randn(2, tokens, DIM, seed=seed + 1)

    found = window_scores(queries, keys, SCALE, pool=pool, kernel=kernel)

    for row in range(2):
        attention = window_attention(queries[row].double().numpy(), keys[row].double().numpy())
        expected = smoothed(attention.sum(1), pool, kernel)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-6)


def test_each_query_of_the_window_gives_one_attention_before_smoothing() -> None:
    found = window_scores(randn(2, 3, 16, DIM, seed=0), randn(2, 50, DIM, seed=1), 1.0, kernel=1)

    torch.testing.assert_close(found.sum(-1), torch.full((2, 3), 16.0))


def test_prefix_and_window_share_out_one_attention() -> None:
    """With the window among the keys, each row of the causal softmax adds up to 1 over both."""
    keys, queries = randn(40, DIM, seed=2).double().numpy(), randn(8, DIM, seed=3).double().numpy()
    logits = queries @ keys.T * SCALE
    logits[:, 32:][np.triu_indices(8, 1)] = -np.inf
    share = np.exp(log_sum_exp(logits[:, :32], 1) - log_sum_exp(logits, 1))

    # What each of the queries gives the prefix is its share of the whole times what it gives alone.
    alone = window_scores(
        torch.from_numpy(queries)[None, :, None], torch.from_numpy(keys[None, :32]), SCALE, kernel=1
    )[0].numpy()

    weights = np.exp(logits - log_sum_exp(logits, 1)[:, None])
    np.testing.assert_allclose(alone * share[:, None], weights[:, :32], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(share + weights[:, 32:].sum(1), 1)


@pytest.mark.parametrize("aggregate", ["mean_group", "max", "per_query"])
@given(st.integers(1, 20), st.integers(0, 22), st.integers(0, 2**32 - 1))
def test_blocks_are_ranked_by_the_scores_of_their_tokens(
    aggregate: str, blocks: int, budget: int, seed: int
) -> None:
    keys, queries = randn(2, blocks * BLOCK_TOKENS, DIM, seed=seed), randn(2, 3, 5, DIM, seed=seed)
    index = built(keys, queries, rule=Rule(aggregate))

    found = select(index, randn(2, 3, DIM, seed=seed), [budget] * 2)

    for row, (ids, _) in enumerate(found):
        attention = window_attention(queries[row].double().numpy(), keys[row].double().numpy())
        tokens = smoothed(attention.sum(1), "avg", 5)
        masses = tokens.reshape(3, blocks, BLOCK_TOKENS).sum(2)
        masses /= masses.sum(1, keepdims=True)
        ranks = (-masses).argsort(1).argsort(1)
        expected = {"mean_group": masses.mean(0), "max": masses.max(0), "per_query": -ranks.min(0)}
        assert_best(ids, expected[aggregate], budget, tolerance=1e-5)


def test_the_selection_does_not_depend_on_the_query() -> None:
    index = built(randn(1, 80, DIM, seed=0), randn(1, 2, 16, DIM, seed=1))

    first, second = (select(index, randn(1, 2, DIM, seed=seed), [7]) for seed in (2, 3))

    assert first == second


def test_generated_blocks_are_selected_beside_the_budget() -> None:
    keys, queries = randn(1, 80, DIM, seed=0), randn(1, 2, 16, DIM, seed=1)
    index = built(keys, queries)
    query = randn(1, 2, DIM, seed=2)
    [(before, _)] = select(index, query, [6])

    extend(index, slice(0, 1), randn(1, 3 * BLOCK_TOKENS, DIM, seed=3))
    [(after, _)] = select(index, query, [6])

    assert sorted(after) == sorted([*before, 20, 21, 22])
    assert np.asarray(index.kept).tolist() == [3]


def test_a_prompt_in_pieces_is_ranked_piece_by_piece() -> None:
    """The second piece is half of what is selected if each has as many good blocks."""
    keys, queries = randn(1, 80, DIM, seed=0), randn(1, 2, 16, DIM, seed=1)
    index = built(keys, queries)

    index.extend(slice(0, 1), keys, keys, IndexContext(20, queries))
    [(ids, _)] = select(index, randn(1, 2, DIM, seed=2), [12])

    assert np.asarray(index.kept).tolist() == [0]
    assert sorted(at % 20 for at in ids) == sorted(2 * [at for at in ids if at < 20])


def test_a_row_without_last_queries_is_ranked_by_recency() -> None:
    index = add_rows(make_index(SnapKVIndex), [randn(80, DIM, seed=0)])

    [(ids, _)] = select(index, randn(1, 2, DIM, seed=1), [4])

    assert sorted(ids) == [16, 17, 18, 19]


def test_its_bytes_are_a_number_and_a_flag_a_block() -> None:
    index = built(randn(1, 4096, DIM, seed=0), randn(1, 2, 16, DIM, seed=1))

    assert index.nbytes == 1024 * (4 + 1) + 3 * 4


@pytest.mark.parametrize("options", [{"pool": "median"}, {"kernel": 4}, {"kernel": 0}])
def test_a_smoothing_that_is_none_is_refused(options: dict[str, str | int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        make_index(SnapKVIndex, **options)  # type: ignore[arg-type]
