"""One score for each unit from the logits of a row's heads, against float64 NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import Floats, log_sum_exp

from tierstore import kernels
from tierstore.kernels import reference

if TYPE_CHECKING:
    from types import ModuleType

AGGREGATES = ["sum", "max", "mean_group", "mean_all", "per_query"]
UNIT_TOKENS = 4.0

both_backends = pytest.mark.parametrize("operations", [kernels, reference], ids=["numba", "torch"])
all_aggregates = pytest.mark.parametrize("aggregate", AGGREGATES)
softmax_or_not = pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "raw"])


def score(
    operations: ModuleType,
    logits: npt.ArrayLike,
    counts: list[int],
    sizes: npt.ArrayLike | None,
    aggregate: str,
    *,
    softmax: bool = True,
    heads: int = 1,
    beside: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float32]:
    raw = np.array(logits, np.float32)
    weights = None if sizes is None else np.array(sizes, np.float32)
    out = np.full((len(raw), raw.shape[2]), np.nan, np.float32)
    others = None if beside is None else np.array(beside, np.float32)
    operations.combine_heads(
        raw, np.array(counts, np.int32), weights, UNIT_TOKENS, others, aggregate, softmax, heads,
        out,
    )  # fmt: skip
    return out


def expected(
    logits: Floats, sizes: Floats, aggregate: str, softmax: bool, beside: Floats
) -> Floats:
    """Scores of one row; "mean_all" before the rows of a sequence are averaged."""
    live = sizes > 0
    scores = np.full(len(sizes), -np.inf)
    own = logits[:, live]
    if not own.size:
        return scores
    if aggregate == "per_query":
        before = (own[:, None] > own[:, :, None]).sum(2)
        ties = own[:, None] == own[:, :, None]
        ranks = before + np.tril(ties, -1).sum(2)
        scores[live] = -np.log1p(ranks.min(0))
        return scores
    if softmax:
        units = log_sum_exp(own + np.log(sizes[live]), axis=1)
        own = own - np.logaddexp(units, beside)[:, None]
    total = log_sum_exp(own, axis=0) if softmax else own.sum(0)
    mean = total - np.log(len(own)) if softmax else total / len(own)
    combined = {"sum": total, "max": own.max(0), "mean_group": mean, "mean_all": mean}
    scores[live] = combined[aggregate]
    return scores


@both_backends
@all_aggregates
@softmax_or_not
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "pages"])
@pytest.mark.parametrize("group", [1, 3, 8])
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.sampled_from([0.25, 1.0, 30.0]),
    st.integers(0, 2**32 - 1),
)
def test_heads_are_combined_as_the_rule_says(
    operations: ModuleType,
    aggregate: str,
    softmax: bool,
    sized: bool,
    group: int,
    counts: list[int],
    heads: int,
    spread: float,
    seed: int,
) -> None:
    """Logits are multiples of 1/64, so some tie. A third of sized units is empty."""
    random = np.random.default_rng(seed)
    counts = np.repeat(counts, heads).tolist()
    rows, room = len(counts), max(counts) + 1
    logits = np.round(random.standard_normal((rows, group, room)) * spread * 64) / 64
    sizes = random.choice([0.0, 0, 1, 4, 5, 60], (rows // heads, room)).repeat(heads, 0)
    for row, count in enumerate(counts):
        logits[row, :, count:], sizes[row, count:] = np.nan, np.nan
    beside = random.choice([-np.inf, 0.0, 2.0 * spread, 100.0], (rows, group))

    found = score(
        operations, logits, counts, sizes if sized else None, aggregate, softmax=softmax,
        heads=heads, beside=beside,
    )  # fmt: skip

    weights = sizes if sized else np.full_like(sizes, UNIT_TOKENS)
    each = [
        expected(logits[row, :, :n], weights[row, :n], aggregate, softmax, beside[row])
        for row, n in enumerate(counts)
    ]
    if aggregate == "mean_all":
        for first in range(0, rows, heads):
            own = np.stack(each[first : first + heads])
            mean = log_sum_exp(own, axis=0) - np.log(heads) if softmax else own.mean(0)
            each[first : first + heads] = [mean] * heads
    for row, n in enumerate(counts):
        tolerance = 3e-6 * max(1.0, spread) * (group if not softmax else 1)
        np.testing.assert_allclose(found[row, :n], each[row], rtol=2e-6, atol=tolerance)
        if aggregate != "mean_all":
            assert np.isnan(found[row, n:]).all()


@both_backends
@pytest.mark.parametrize("aggregate", ["sum", "max"])
def test_empty_units_get_nothing_and_take_nothing(operations: ModuleType, aggregate: str) -> None:
    """The empty unit has by far the largest logit: it must not enter the normaliser either."""
    found = score(operations, [[[500.0, 0, 0]]], [3], [[0.0, 1, 3]], aggregate)

    np.testing.assert_allclose(found, [[-np.inf, -np.log(4), -np.log(4)]], rtol=1e-6)


@both_backends
@all_aggregates
@softmax_or_not
def test_all_units_empty_all_get_nothing(
    operations: ModuleType, aggregate: str, softmax: bool
) -> None:
    found = score(operations, np.ones((1, 3, 5)), [4], np.zeros((1, 5)), aggregate, softmax=softmax)

    assert np.isneginf(found[0, :4]).all()


@both_backends
def test_size_weighs_in_the_normaliser_but_not_in_the_score(operations: ModuleType) -> None:
    """Two units with the same logit score alike, however many tokens each stands for."""
    found = score(operations, [[[2.0, 2.0]]], [2], [[1.0, 63.0]], "sum")

    np.testing.assert_allclose(found, [[-np.log(64), -np.log(64)]], rtol=1e-6)


@both_backends
@pytest.mark.parametrize(
    ("aggregate", "masses"),
    [("sum", [1.5, 0.5]), ("max", [1.0, 0.5]), ("mean_group", [0.75, 0.25])],
)
def test_heads_are_normalised_before_they_are_combined(
    operations: ModuleType, aggregate: str, masses: list[float]
) -> None:
    """One head sees unit 0 alone, the other sees both alike; logits summed first would differ."""
    found = score(operations, [[[30.0, 0.0], [0.0, 0.0]]], [2], np.ones((1, 2)), aggregate)

    np.testing.assert_allclose(found, [np.log(masses)], atol=3e-6)


@both_backends
@pytest.mark.parametrize("aggregate", ["sum", "max", "mean_group", "mean_all"])
def test_huge_logits_do_not_overflow(operations: ModuleType, aggregate: str) -> None:
    found = score(operations, [[[-1e5, 1e5, 0.5e5]]], [3], np.ones((1, 3)), aggregate)

    np.testing.assert_allclose(found, [[-2e5, 0.0, -0.5e5]])
