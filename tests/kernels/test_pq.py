"""Product-quantised keys: encoding, packed codes and table lookups against float64 NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import exactly, stored

from tierstore import kernels
from tierstore.kernels import reference

pq = pytest.importorskip("tierstore.kernels.cpu.pq")

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

SHAPES = [(4, 8, 6, 4), (1, 2, 6, 16), (3, 5, 3, 2), (2, 4, 8, 3), (2, 3, 5, 2)]
"""(query heads, parts, bits, width of a part): each is compiled once."""


def packed_by_numpy(codes: Bytes, bits: int) -> Words:
    """Bit b of the code of token t is bit t % 64 of word b of group t // 64."""
    rows, tokens, parts = codes.shape
    whole = np.zeros((rows, -(-tokens // 64) * 64, parts), np.uint8)
    whole[:, :tokens] = codes
    planes = whole[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    by_group = planes.reshape(rows, -1, 64, parts, bits).transpose(0, 1, 3, 4, 2)
    packed: Words = np.packbits(by_group, axis=-1, bitorder="little").view(np.int64)[..., 0]
    return packed


@pytest.mark.parametrize("backend", [kernels.pack_codes, reference.pack_codes])
@given(st.integers(1, 8), st.integers(1, 150), st.integers(0, 149), st.integers(0, 2**32 - 1))
def test_codes_are_packed_wherever_they_begin(
    backend: object, bits: int, tokens: int, first: int, seed: int
) -> None:
    """Over what was there, and nothing else is touched."""
    first = min(first, tokens - 1)
    generator = np.random.default_rng(seed)
    before, after = generator.integers(0, 1 << bits, (2, 2, tokens, 3)).astype(np.uint8)
    packed = packed_by_numpy(before, bits)
    last = int(generator.integers(first, tokens)) + 1

    backend(np.ascontiguousarray(after[:, first:last]), first, packed)  # type: ignore[operator]

    before[:, first:last] = after[:, first:last]
    np.testing.assert_array_equal(packed, packed_by_numpy(before, bits))


@pytest.mark.parametrize("backend", [kernels.nearest_centroids, reference.nearest_centroids])
@pytest.mark.parametrize("dim", [3, 4, 20])
@given(st.integers(1, 150), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_the_best_centroid_is_found(
    backend: object, dim: int, n: int, clusters: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    points, centroids, offsets = (
        generator.normal(size=shape).astype(np.float32)
        for shape in ((2, n, dim), (2, clusters, dim), (2, clusters))
    )
    found = np.empty((2, n), np.int64)

    backend(points, centroids, offsets, found)  # type: ignore[operator]

    fits = np.einsum("rnd,rkd->rnk", points.astype(float), centroids.astype(float))
    fits += offsets[:, None]
    chosen = np.take_along_axis(fits, found[..., None], 2)[..., 0]
    np.testing.assert_allclose(chosen, fits.max(2), atol=1e-5)


@pytest.mark.parametrize("backend", [kernels.cluster_sums, reference.cluster_sums])
@pytest.mark.parametrize("dim", [3, 20])
@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_points_are_summed_up_by_cluster(
    backend: object, dim: int, n: int, clusters: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    points = generator.normal(size=(2, n, dim)).astype(np.float32)
    labels = generator.integers(0, clusters, (2, n))
    sums, sizes = np.full((2, clusters, dim), np.nan, np.float32), np.full((2, clusters), -1)

    backend(points, labels, sums, sizes)  # type: ignore[operator]

    members = labels[..., None] == np.arange(clusters)
    np.testing.assert_array_equal(sizes, members.sum(1))
    expected = np.einsum("rnk,rnd->rkd", members.astype(float), points.astype(float))
    np.testing.assert_allclose(sums, expected, atol=1e-5)


@pytest.mark.parametrize("backend", [kernels.nearest_centroids, reference.nearest_centroids])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_point_that_fits_nothing_has_a_centroid_all_the_same(
    backend: object, broken: float
) -> None:
    """Labels are used to write: one out of bounds would write over something else."""
    points = np.full((1, 4, 2), broken, np.float32)
    points[0, 1] = -broken
    centroids = np.array([[[1.0, -1.0], [0.5, 2.0], [0.0, 0.0]]], np.float32)
    found = np.full((1, 4), -1, np.int64)
    backend(points, centroids, np.zeros((1, 3), np.float32), found)  # type: ignore[operator]
    assert ((found >= 0) & (found < 3)).all()


def test_points_may_be_a_part_of_an_array() -> None:
    wide = np.random.default_rng(0).normal(size=(2, 70, 8)).astype(np.float32)
    points, labels = wide[:, ::2, 1:8:2], np.zeros((2, 35), np.int64)
    found, expected = np.empty((2, 2, 35), np.int64)
    sums, sizes = np.empty((2, 1, 4), np.float32), np.empty((2, 1), np.int64)

    kernels.nearest_centroids(points, points[:, :9], points[:, :9, 0], found)
    reference.nearest_centroids(
        points.copy(), points[:, :9].copy(), points[:, :9, 0].copy(), expected
    )
    kernels.cluster_sums(points, labels, sums, sizes)

    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(sums[:, 0], points.sum(1), rtol=1e-4)


def test_of_equal_centroids_the_first_is_taken() -> None:
    found = np.empty((1, 3), np.uint8)
    ones = np.ones((1, 70, 4), np.float32)

    kernels.nearest_centroids(ones[:, :3], ones, ones[..., 0].copy(), found)

    assert not found.any()


class Case:
    """Random codes and codewords, and the logits that float64 finds."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
        group, parts, self.bits, width = shape
        generator = np.random.default_rng(seed)
        self.counts = generator.integers(0, 200, 3).astype(np.int32)
        self.counts[0] = 130
        self.codes = generator.integers(0, 1 << self.bits, (3, 200, parts)).astype(np.uint8)
        self.packed = packed_by_numpy(self.codes, self.bits)
        self.query = stored(3 * generator.normal(size=(3, group, parts * width)), dtype)
        words = generator.normal(size=(3, parts, 1 << self.bits, width + 1))
        self.words = stored(words, dtype)
        query = exactly(self.query, dtype).reshape(3, group, parts, width)
        self.tables = 0.3 * np.einsum(
            "rgmw,rmcw->rgmc", query, exactly(self.words, dtype)[..., :width]
        )
        self.bounds = np.ptp(self.tables, axis=-1).max(-1) * parts / 510

    def logits(self, row: int) -> Floats:
        own = self.codes[row, : self.counts[row]].astype(np.int64)
        parts = range(own.shape[1])
        total: Floats = np.sum([self.tables[row, :, part][:, own[:, part]] for part in parts], 0)
        return total

    def out(self) -> npt.NDArray[np.float32]:
        return np.zeros((3, self.query.shape[1], 256), np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_sums_of_products(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for seed in range(3):
        case = Case(shape, dtype, seed)
        exact, bytewise = case.out(), case.out()
        arguments = (case.query, case.words, case.packed, case.counts, 0.3)

        reference.pq_logits(*arguments, exact)
        kernels.pq_logits(*arguments, bytewise)

        for row, count in enumerate(case.counts.tolist()):
            expected = case.logits(row)
            np.testing.assert_allclose(exact[row, :, :count], expected, rtol=1e-4, atol=1e-4)
            off = np.abs(bytewise[row, :, :count] - expected).max(-1, initial=0)
            assert (off <= case.bounds[row] * 1.001 + 1e-4).all()


@pytest.mark.parametrize("registers", [256, 512])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] <= 6])
def test_byte_permutes_give_what_plain_loops_do(
    shape: tuple[int, int, int, int], registers: int
) -> None:
    if pq.permuting_bits() < registers:
        pytest.skip("needs AVX2, or AVX-512 with VBMI")
    case = Case(shape, torch.float32, seed=7)
    found = []
    for permutes in (registers, 0):
        out = case.out()
        kernel = pq.lookup_kernel(*shape, permutes)
        kernel(case.query, case.words, case.packed, 0, 3, case.counts, np.float32(0.3), out)
        found.append([out[row, :, :count] for row, count in enumerate(case.counts.tolist())])

    for permuted, plain in zip(*found, strict=True):
        np.testing.assert_allclose(permuted, plain, rtol=1e-6, atol=1e-6)


def test_tables_of_nothing_and_of_huge_numbers_stay_finite() -> None:
    for value in (0.0, 1e38):
        case = Case(SHAPES[0], torch.float32, seed=1)
        case.words[:] = value
        out = case.out()
        kernels.pq_logits(case.query, case.words, case.packed, case.counts, 1.0, out)
        assert np.isfinite(out).all()
