"""Triton kernels that make and scan what an index keeps, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_device import MARKS, back, few, seeds, there
from oracles import exactly, stored
from test_pq import SHAPES as LOOKED_UP  # type: ignore[import-not-found]
from test_pq import Case as LookedUp
from test_pq import packed_by_numpy

from tierstore.kernels import triton

pytestmark = MARKS


def singles(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return random.standard_normal(shape).astype(np.float32)


@few
@given(st.integers(1, 32), st.integers(1, 4), st.sampled_from([64, 80, 96, 256]), seeds)
def test_pages_are_represented(page: int, pages: int, dim: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    keys = stored(random.standard_normal((2, page * pages, dim)), torch.bfloat16)
    mean = there(np.zeros((2, pages, dim), np.float32))
    high, low = (there(np.zeros((2, pages, dim), np.uint16)) for _ in range(2))

    triton.page_means(there(keys), page, mean)
    triton.page_bounds(there(keys), page, high, low)

    by_page = exactly(keys, torch.bfloat16).reshape(2, pages, page, dim)
    np.testing.assert_allclose(back(mean), by_page.mean(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(exactly(back(high), torch.bfloat16), by_page.max(2))
    np.testing.assert_array_equal(exactly(back(low), torch.bfloat16), by_page.min(2))


@few
@given(
    st.integers(1, 100), st.integers(1, 70), st.sampled_from([2, 16, 64, 80]), st.booleans(), seeds
)
def test_a_round_of_k_means(n: int, clusters: int, dim: int, euclidean: bool, seed: int) -> None:
    """An assignment may differ from the best only by rounding; sums are of what was assigned."""
    random = np.random.default_rng(seed)
    points, centroids = singles(random, 2, n, dim), singles(random, 2, clusters, dim)
    offsets = (centroids**2).sum(-1) / -2 if euclidean else np.zeros((2, clusters), np.float32)
    x, labels = there(points), there(np.full((2, n), -1))
    sums, sizes = there(np.full_like(centroids, np.nan)), there(np.full((2, clusters), -1))

    triton.nearest_centroids(x, there(centroids), there(offsets), labels)
    triton.cluster_sums(x, labels, sums, sizes)

    own = back(labels)
    scores = points.astype(np.float64) @ centroids.astype(np.float64).transpose(0, 2, 1)
    scores += offsets[:, None]
    picked = np.take_along_axis(scores, own[..., None], -1)[..., 0]
    assert (picked >= scores.max(-1) - 1e-4).all()
    members = own[..., None] == np.arange(clusters)
    np.testing.assert_array_equal(back(sizes), members.sum(1))
    expected = np.einsum("rnk,rnd->rkd", members.astype(float), points.astype(float))
    np.testing.assert_allclose(back(sums), expected, rtol=1e-5, atol=1e-5)


def test_equal_centroids_go_to_the_first() -> None:
    ones = np.ones((1, 130, 64), np.float32)
    found = there(np.full((1, 3), 7, np.uint8))

    triton.nearest_centroids(
        there(ones[:, :3].copy()), there(ones), there(ones[..., 0].copy()), found
    )

    assert not back(found).any()


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_point_that_fits_nothing_has_a_centroid_all_the_same(broken: float) -> None:
    points = np.full((1, 4, 2), broken, np.float32)
    points[0, 1] = -broken
    centroids = np.array([[[1.0, -1.0], [0.5, 2.0], [0.0, 0.0]]], np.float32)
    found = there(np.full((1, 4), -1))

    triton.nearest_centroids(
        there(points), there(centroids), there(np.zeros((1, 3), np.float32)), found
    )

    assert ((back(found) >= 0) & (back(found) < 3)).all()


@few
@given(st.integers(1, 8), st.integers(1, 150), st.integers(0, 149), st.integers(0, 149), seeds)
def test_codes_are_packed_wherever_they_begin(
    bits: int, tokens: int, first: int, count: int, seed: int
) -> None:
    """Over what was there, and nothing else is touched."""
    first = min(first, tokens)
    last = min(first + count, tokens)
    random = np.random.default_rng(seed)
    before, after = random.integers(0, 1 << bits, (2, 2, tokens, 3)).astype(np.uint8)
    packed = there(packed_by_numpy(before, bits))

    triton.pack_codes(there(np.ascontiguousarray(after[:, first:last])), first, packed)

    before[:, first:last] = after[:, first:last]
    np.testing.assert_array_equal(back(packed), packed_by_numpy(before, bits))


@pytest.mark.parametrize("shape", LOOKED_UP)
@few
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seeds)
def test_logits_of_packed_codes_are_sums_of_products(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """What is behind a row's tokens stays as it is; codewords may be wider than their parts."""
    case = LookedUp(shape, dtype, seed)
    out = there(np.full_like(case.out(), np.nan))

    triton.pq_logits(
        there(case.query), there(case.words), there(case.packed), case.counts, 0.3, out
    )

    for row, count in enumerate(case.counts.tolist()):
        np.testing.assert_allclose(
            back(out)[row, :, :count], case.logits(row), rtol=1e-4, atol=1e-4
        )
        assert np.isnan(back(out)[row, :, count:]).all()
