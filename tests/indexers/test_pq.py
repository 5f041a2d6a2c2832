"""Product quantisation: exact where it must be, and what weighting by queries is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from index_rows import BLOCK_TOKENS, DIM, add_rows, block_masses, extend, make_index, select
from oracles import log_sum_exp

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.indexers import PQIndex, ScoringIndex, WeightedPQIndex
from tierstore.interfaces import IndexContext


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PQIndex, {}),
        (PQIndex, {"parts": 4, "metric": "inner"}),
        (WeightedPQIndex, {"dims": DIM}),
    ],
)
def test_a_codeword_for_each_token_scores_as_the_keys_do(
    kind: type[ScoringIndex], options: dict[str, object]
) -> None:
    """What is left is the rounding of lookup tables to bytes."""
    keys, query = randn(2, 64, DIM, seed=0), randn(2, 2, DIM, seed=1)
    index = make_index(kind, **{"iterations": 1, **options})  # type: ignore[arg-type]
    add_rows(index, list(keys))

    found = select(index, query, [16, 16])

    for row, (ids, scores) in enumerate(found):
        masses = block_masses(query[row].double().numpy(), keys[row].double().numpy(), DIM**-0.5)
        np.testing.assert_allclose(scores, np.log(masses)[ids], atol=0.03)


def augmented(parts: np.ndarray) -> np.ndarray:
    squares = np.square(parts).sum(1)
    return np.concatenate([parts, np.sqrt(squares.max() - squares)[:, None]], 1)


def test_appending_what_norms_lack_turns_inner_products_into_distances() -> None:
    """The index stores the codewords so; the queries' element for it is 0."""
    keys = randn(1, 64, DIM, seed=2)
    index = make_index(PQIndex, parts=2, metric="inner", iterations=1)
    add_rows(index, list(keys))
    words = index.state()["codewords"][0].astype(np.float64)
    halves = keys[0].double().numpy().reshape(64, 2, DIM // 2)
    query = randn(DIM // 2, seed=3).double().numpy()

    for part in range(2):
        expected = augmented(halves[:, part])
        np.testing.assert_allclose(words[part], expected, atol=1e-5)
        nearest = np.square(expected - np.append(query, 0)).sum(1)
        np.testing.assert_array_equal(np.argsort(nearest), np.argsort(-halves[:, part] @ query))


def test_later_tokens_get_the_nearest_of_the_codewords_there_are() -> None:
    keys, later = randn(1, 256, DIM, seed=4), randn(1, 12, DIM, seed=5)
    index = add_rows(make_index(PQIndex), list(keys))
    words = index.state()["codewords"].copy()
    query = randn(1, 2, DIM, seed=6)
    extend(index, slice(0, 1), later)

    [(ids, scores)] = select(index, query, [67])

    np.testing.assert_array_equal(index.state()["codewords"], words)
    every = torch.cat([keys, later], 1)[0].double().numpy().reshape(-1, 2, DIM // 2)
    codes = [
        np.square(every[:, p, None] - words[0, p].astype(np.float64)).sum(2).argmin(1)
        for p in range(2)
    ]
    replaced = np.concatenate([words[0, p][codes[p]] for p in range(2)], 1).astype(np.float64)
    # Training stops before all settles: codes of the build are those of the codewords kept.
    expected = np.log(block_masses(query[0].double().numpy(), replaced, DIM**-0.5))
    np.testing.assert_allclose(scores, expected[ids], atol=0.05)


def mass_found(index: ScoringIndex, query: torch.Tensor, keys: torch.Tensor) -> float:
    [(ids, _)] = select(index, query, [16])
    masses = block_masses(query[0].double().numpy(), keys.double().numpy(), DIM**-0.5)
    return float(masses[ids].sum() / np.sort(masses)[-16:].sum())


def test_knowing_what_queries_look_at_finds_more() -> None:
    """Keys are loudest in the half of their dimensions that queries do not look at."""
    loud, seen = torch.tensor([1.5, 1.0]), torch.tensor([0.0, 3.0])
    halves = torch.arange(DIM) // (DIM // 2)
    keys = randn(1, 1024, DIM, seed=7) * loud[halves]
    queries = randn(1, 2, 64, DIM, seed=8) * seen[halves]
    found = []
    for context in (IndexContext(last_queries=queries), IndexContext()):
        index = make_index(WeightedPQIndex, dims=16)
        index.add_rows(np.zeros(1, np.int32))
        index.extend(slice(0, 1), keys, keys, context)
        found.append(mass_found(index, queries[:, :, 0], keys[0]))

    assert found[0] > 0.6 > found[1] + 0.2


def test_the_axes_with_the_largest_errors_are_coded_twice() -> None:
    """Codes are read from the state as its layout says, and everything is done again in float64."""
    keys, later = randn(1, 1024, DIM, seed=15), randn(1, 64, DIM, seed=16)
    query = randn(1, 2, DIM, seed=17)
    index = add_rows(make_index(WeightedPQIndex, dims=16), list(keys))
    extend(index, slice(0, 1), later)
    state = {name: array[0] for name, array in index.state().items() if array.ndim > 1}
    bits = state["codes"][:, :, :, None] >> np.arange(64) & 1  # groups, codes, bits, tokens
    codes = (bits << np.arange(6)[:, None]).sum(2).transpose(0, 2, 1).reshape(-1, 9)[:1088]
    words = state["codewords"].astype(np.float64)
    seen = torch.cat([keys, later], 1)[0].double().numpy() @ state["key_basis"].T - state["centre"]
    known = np.concatenate([words[part, codes[:, part]] for part in range(8)], 1)
    before = np.square(seen - known)[:1024].sum(0)

    assert set(state["refined"]) == set(np.argsort(before)[-2:])
    known[:, state["refined"]] += words[8, codes[:, 8]]
    after = np.square(seen - known)[:1024].sum(0)
    assert (after <= before).all()
    assert (after[state["refined"]] < 0.2 * before[state["refined"]]).all()
    logits = query[0].double().numpy() @ state["query_basis"].T @ known.T * DIM**-0.5
    masses = np.exp(logits - log_sum_exp(logits, 1)[:, None]).sum(0).reshape(-1, BLOCK_TOKENS)
    [(ids, scores)] = select(index, query, [len(masses)])
    np.testing.assert_allclose(scores, np.log(masses.sum(1))[ids], atol=0.05)


def test_in_training_keys_count_by_the_root_of_their_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, queries = randn(1, 512, DIM, seed=18), 4 * randn(1, 2, 16, DIM, seed=19)
    context, words = IndexContext(last_queries=queries), []
    logits = queries[0].double() @ keys[0].double().T * DIM**-0.5
    masses = logits.softmax(-1).sum((0, 1)).numpy()

    weighted = make_index(WeightedPQIndex, dims=16)
    assert isinstance(weighted, WeightedPQIndex)
    counts = weighted.importance(keys, context)

    assert counts is not None
    np.testing.assert_allclose(counts[0], np.sqrt(masses / masses.mean() + 0.1), rtol=1e-4)
    for _ in range(2):
        index = make_index(WeightedPQIndex, dims=16)
        index.add_rows(np.zeros(1, np.int32))
        index.extend(slice(0, 1), keys, keys, context)
        words.append(index.state()["codewords"])
        monkeypatch.setattr(WeightedPQIndex, "importance", lambda *_: None)
    with_counts, without = words
    assert not np.array_equal(with_counts, without)


def test_a_loud_isolated_token_is_found() -> None:
    """One token that a mean of its neighbours would hide."""
    keys = randn(1, 4096, DIM, seed=9)
    query = randn(1, 1, DIM, seed=10).expand(1, 2, DIM).contiguous()
    keys[0, 2001] = 2 * query[0, 0]
    index = add_rows(make_index(WeightedPQIndex), list(keys))

    [(ids, _)] = select(index, query, [8])

    assert 2001 // BLOCK_TOKENS in ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_codes_codewords_and_bases(dtype: torch.dtype) -> None:
    index = make_index(WeightedPQIndex, dtype=dtype, dims=16)
    add_rows(index, [randn(4096, DIM, seed=11)])
    codes, words, bases = 4096 * 9 * 6 // 8, 9 * 64 * 2, 2 * 16 * DIM
    centre, refined, counts = 16 * 4, 2 * 8, 8

    assert index.nbytes == codes + (words + bases) * dtype.itemsize + centre + refined + counts


def test_log_sum_exp_of_masses_is_one() -> None:
    """Scores of all blocks are log masses of the row: they add up to the query heads."""
    index = add_rows(make_index(WeightedPQIndex), [randn(400, DIM, seed=12)])

    [(_, scores)] = select(index, randn(1, 2, DIM, seed=13), [100])

    np.testing.assert_allclose(log_sum_exp(np.array(scores), 0), np.log(2), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PQIndex, {"parts": 3}),
        (PQIndex, {"parts": 0}),
        (PQIndex, {"bits": 9}),
        (PQIndex, {"bits": 0}),
        (PQIndex, {"iterations": 0}),
        (PQIndex, {"metric": "cosine"}),
        (PQIndex, {"training_tokens": 0}),
        (WeightedPQIndex, {"dims": DIM + 1}),
        (WeightedPQIndex, {"dims": 0}),
        (WeightedPQIndex, {"dims": 12}),
    ],
)
def test_options_are_checked(kind: type[ScoringIndex], options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make_index(kind, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"parts": 4}, {"bits": 5}, {"metric": "inner"}])
def test_codes_of_another_shape_are_not_taken_over(options: dict[str, object]) -> None:
    state = add_rows(make_index(PQIndex), [randn(8, DIM, seed=14)]).state()
    with pytest.raises(StoreMismatchError, match="another kind of index"):
        make_index(PQIndex, **options).restore(state)  # type: ignore[arg-type]
