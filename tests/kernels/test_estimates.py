"""Attention over clusters and over hashed samples, both CPU backends against float64 NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import attention, exactly, log_sum_exp, stored

from tierstore import kernels
from tierstore.kernels import BlockShape, estimate_reference

if TYPE_CHECKING:
    import numpy.typing as npt
    from oracles import Floats

both_backends = pytest.mark.parametrize("backend", ["numba", "torch"])
seeds = st.integers(0, 2**32 - 1)

# (query heads per row, key dim, value dim, element type): each is compiled once.
SHAPES = [
    (1, 64, 64, torch.float32),
    (4, 128, 128, torch.bfloat16),
    (3, 80, 96, torch.float16),
]


def merged(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    lse = log_sum_exp(np.stack([first[1], second[1]], -1), axis=1)
    safe = np.where(np.isneginf(lse), 0.0, lse)
    a, b = (np.exp(part - safe)[:, None] for part in (first[1], second[1]))
    return a * first[0] + b * second[0], lse


def weighted(logits: Floats, values: Floats) -> tuple[Floats, Floats]:
    lse = log_sum_exp(logits, axis=1)
    return np.exp(logits - np.where(np.isneginf(lse), 0.0, lse)[:, None]) @ values, lse


def attend_clusters(
    backend: str,
    query: npt.NDArray[np.generic],
    centroids: npt.NDArray[np.generic],
    values: npt.NDArray[np.generic],
    sizes: npt.NDArray[np.float32],
    chosen: list[list[int]],
    scale: float,
    before: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None,
) -> tuple[Floats, Floats]:
    shape = (*query.shape[:2], values.shape[2])
    out, lse = np.full(shape, np.nan, np.float32), np.full(shape[:2], np.nan, np.float32)
    if before is not None:
        out, lse = before[0].copy(), before[1].copy()
    row_ptr = np.concatenate([[0], np.cumsum([len(own) for own in chosen])]).astype(np.int64)
    units = np.array([unit for own in chosen for unit in own], np.int32)
    operations = estimate_reference if backend == "torch" else kernels
    operations.attend_clusters(
        query, centroids, values, sizes, row_ptr, units, scale, out, lse, merge=before is not None
    )
    return out.astype(np.float64), lse.astype(np.float64)


@both_backends
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    seeds,
    st.sampled_from([0.1, 1.0, 10.0]),
    st.booleans(),
)
def test_a_cluster_counts_as_often_as_it_has_tokens(
    shape: tuple[int, int, int, torch.dtype],
    backend: str,
    chosen: list[int],
    seed: int,
    spread: float,
    merge: bool,
) -> None:
    group, dim, value_dim, dtype = shape
    random, rows = np.random.default_rng(seed), len(chosen)
    query = stored(random.standard_normal((rows, group, dim)), dtype)
    centroids = stored(random.standard_normal((rows, 15, dim)), dtype)
    values = stored(random.standard_normal((rows, 15, value_dim)), dtype)
    sizes = random.choice([0, 1, 2, 60], (rows, 15)).astype(np.float32)
    units = [random.permutation(15)[:count].tolist() for count in chosen]
    before = (
        random.standard_normal((rows, group, value_dim)).astype(np.float32),
        np.where(random.random((rows, group)) < 0.3, -np.inf, 1.5).astype(np.float32),
    )
    before[0][np.isneginf(before[1])] = 0
    scale = spread * dim**-0.5

    out, lse = attend_clusters(
        backend, query, centroids, values, sizes, units, scale, before if merge else None
    )

    for row, own in enumerate(units):
        often = sizes[row, own].astype(int)
        keys = np.repeat(exactly(centroids[row, own], dtype), often, axis=0)
        tokens = np.repeat(exactly(values[row, own], dtype), often, axis=0)
        expected = attention(exactly(query[row], dtype), keys, tokens, scale)
        if merge:
            expected = merged((before[0][row].astype(np.float64), before[1][row]), expected)
        np.testing.assert_allclose(out[row], expected[0], rtol=1e-5, atol=5e-6 * max(1, spread))
        np.testing.assert_allclose(lse[row], expected[1], rtol=2e-6, atol=2e-6 * max(1, spread))


@both_backends
@given(seeds, st.integers(1, 6), st.sampled_from([1.0, 4.0]))
def test_the_estimated_mass_is_at_most_the_true_one(
    backend: str, seed: int, size: int, spread: float
) -> None:
    """Jensen; and equal, with the output, where clusters have one token or keys that agree."""
    random = np.random.default_rng(seed)
    query = random.standard_normal((1, 2, 16)) * spread
    keys = random.standard_normal((7, size, 16))
    values = random.standard_normal((7, size, 8))
    sizes = np.full((1, 7), size, np.float32)
    for own, is_exact in ((keys, size == 1), (np.repeat(keys[:, :1], size, 1), True)):
        found = attend_clusters(
            backend, query.astype(np.float32), own.mean(1)[None].astype(np.float32),
            values.mean(1)[None].astype(np.float32), sizes, [list(range(7))], 0.25,
        )  # fmt: skip
        out, lse = attention(query[0], own.reshape(-1, 16), values.reshape(-1, 8), 0.25)
        assert (found[1][0] <= lse + 1e-5).all()
        if is_exact:
            np.testing.assert_allclose(found[0][0], out, atol=2e-5)
            np.testing.assert_allclose(found[1][0], lse, atol=2e-5)


@pytest.mark.parametrize(
    ("hash_size", "expected"),
    [
        ((10, 150), [0.00067, 0.0097, 0.0867, 0.7356, 1.0]),
        ((11, 300), [0.0005, 0.0097, 0.1063, 0.8623, 1.0]),
    ],
)
def test_inclusion_probabilities_are_those_published(
    hash_size: tuple[int, int], expected: list[float]
) -> None:
    cosines = torch.tensor([-0.2, 0, 0.2, 0.5, 0.8])

    found = estimate_reference.inclusion_probability(cosines, *hash_size)

    np.testing.assert_allclose(found, expected, atol=6e-5)


def codes_of(vectors: Floats, planes: Floats, bits: int) -> npt.NDArray[np.int16]:
    positive = (vectors @ planes > 0).reshape(*vectors.shape[:-1], -1, bits)
    codes: npt.NDArray[np.int16] = (positive * 2 ** np.arange(bits)).sum(-1).astype(np.int16)
    return codes


def test_projections_may_be_a_part_of_an_array() -> None:
    projections = np.random.default_rng(2).standard_normal((1, 3, 400))[:, :, ::2]
    found, expected = np.zeros((2, 1, 3, 20), np.int16)

    kernels.pack_signs(projections, 10, found)

    estimate_reference.pack_signs(projections.astype(np.float32), 10, expected)
    np.testing.assert_array_equal(found, expected)


@both_backends
@pytest.mark.parametrize("bits", [1, 10, 15])
def test_codes_are_the_signs_and_collisions_their_equality(backend: str, bits: int) -> None:
    random = np.random.default_rng(bits)
    planes = random.standard_normal((8, 20 * bits))
    keys, asked = random.standard_normal((2, 30, 8)), random.standard_normal((2, 3, 8))
    operations = estimate_reference if backend == "torch" else kernels
    packed = []
    for vectors in (keys, asked):
        out = np.zeros((*vectors.shape[:2], 20), np.int16)
        operations.pack_signs((vectors @ planes).astype(np.float32), bits, out)
        np.testing.assert_array_equal(out, codes_of(vectors, planes, bits))
        packed.append(out)
    counts = np.array([30, 11], np.int32)
    met = np.full((2, 3, 30), np.nan, np.float32)

    operations.count_collisions(packed[1], packed[0], counts, met)

    for row, n in enumerate(counts):
        same = packed[1][row][:, None] == packed[0][row, :n]
        np.testing.assert_array_equal(met[row, :, :n], same.sum(-1))
        assert np.isnan(met[row, :, n:]).all()


TOKENS, DIM, GAP = 3, 16, 2


def attend_sampled(
    backend: str,
    query: Floats,
    keys: Floats,
    values: Floats,
    met: Floats,
    centre: Floats,
    hash_size: tuple[int, int],
    order: list[int],
    before: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None,
) -> tuple[Floats, Floats]:
    """One row whose blocks, in `order`, stand in slots the other way round."""
    blocks, value_dim = len(keys) // TOKENS, values.shape[1]
    offset = TOKENS * DIM + GAP
    pool = np.full((blocks, offset + TOKENS * value_dim), np.nan, np.float32)
    pool[:, : TOKENS * DIM] = keys.reshape(blocks, -1)[::-1]
    pool[:, offset:] = values.reshape(blocks, -1)[::-1]
    out = np.full((1, len(query), value_dim), np.nan, np.float32)
    lse = np.full((1, len(query)), np.nan, np.float32)
    if before is not None:
        out, lse = before[0].copy(), before[1].copy()
    numbers = np.array(order, np.int32)
    operations = estimate_reference if backend == "torch" else kernels
    operations.attend_sampled(
        query[None].astype(np.float32), pool, BlockShape(TOKENS, DIM, value_dim, offset),
        np.array([0, len(order)], np.int64), (blocks - 1 - numbers).astype(np.int32),
        np.full(len(order), TOKENS, np.uint8), numbers, met[None].astype(np.float32),
        centre[None].astype(np.float32), *hash_size, DIM**-0.5, out, lse,
        merge=before is not None,
    )  # fmt: skip
    return out[0].astype(np.float64), lse[0].astype(np.float64)


def expected_sampled(
    query: Floats,
    keys: Floats,
    values: Floats,
    met: Floats,
    centre: Floats,
    hash_size: tuple[int, int],
) -> tuple[Floats, Floats]:
    bits, tables = hash_size
    hashed = keys - centre
    cosine = query @ hashed.T / np.linalg.norm(query, axis=1)[:, None]
    hit = (1 - np.arccos(np.clip(cosine / np.linalg.norm(hashed, axis=1), -1, 1)) / np.pi) ** bits
    w = 1 - (1 - hit) ** tables - tables * hit * (1 - hit) ** (tables - 1)
    logits = query @ keys.T * DIM**-0.5 - np.log(w + 1e-4)
    return weighted(np.where(met >= 2, logits, -np.inf), values)


@both_backends
@given(seeds, st.integers(1, 8), st.booleans())
def test_sampled_logits_are_corrected_by_their_probability(
    backend: str, seed: int, blocks: int, merge: bool
) -> None:
    random = np.random.default_rng(seed)
    n, order = blocks * TOKENS, random.permutation(blocks).tolist()
    query, keys = random.standard_normal((2, DIM)), random.standard_normal((n, DIM))
    values, centre = random.standard_normal((n, 8)), random.standard_normal(DIM)
    met = random.integers(0, 4, (2, n)).astype(np.float64)
    before = (
        random.standard_normal((1, 2, 8)).astype(np.float32),
        np.array([[0.5, 1.5]], np.float32),
    )

    out, lse = attend_sampled(
        backend, query, keys, values, met, centre, (10, 150), order, before if merge else None
    )

    expected = expected_sampled(query, keys, values, met, centre, (10, 150))
    if merge:
        expected = merged((before[0][0].astype(np.float64), before[1][0]), expected)
    np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-4, atol=2e-4)


@both_backends
def test_a_shift_of_all_keys_changes_no_output(backend: str) -> None:
    """Their centre moves along; the log-sum-exp moves by the logit of the shift."""
    random = np.random.default_rng(4)
    query, keys = random.standard_normal((2, DIM)), random.standard_normal((12, DIM))
    values, shift = random.standard_normal((12, 8)), 3 * random.standard_normal(DIM)
    met = random.integers(0, 5, (2, 12)).astype(np.float64)
    centre, order = keys.mean(0), [3, 0, 1, 2]
    plain = attend_sampled(backend, query, keys, values, met, centre, (4, 20), order)

    out, lse = attend_sampled(
        backend, query, keys + shift, values, met, centre + shift, (4, 20), order
    )

    np.testing.assert_allclose(out, plain[0], atol=1e-4)
    np.testing.assert_allclose(lse, plain[1] + query @ shift * DIM**-0.5, atol=1e-4)


@both_backends
def test_sampled_mass_is_unbiased_over_hashes(backend: str) -> None:
    """The mean over 400 hashes is within three standard errors of the sum over all keys.

    Keys are near the query, where the floor under the probability does not show.
    """
    random = np.random.default_rng(5)
    query = random.standard_normal((1, DIM))
    keys = 0.7 * query + random.standard_normal((30, DIM))
    values, centre = np.ones((30, 1)), np.zeros(DIM)
    bits, tables = 4, 12
    masses = []
    for _ in range(400):
        planes = random.standard_normal((DIM, bits * tables))
        met = (codes_of(query, planes, bits)[:, None] == codes_of(keys, planes, bits)).sum(-1)
        _, lse = attend_sampled(
            backend, query, keys, values, met.astype(np.float64), centre, (bits, tables),
            list(range(10)),
        )  # fmt: skip
        masses.append(float(np.exp(lse[0])))
    truth = np.exp(query @ keys.T * DIM**-0.5).sum()
    error = np.std(masses, ddof=1) / np.sqrt(len(masses))

    assert abs(np.mean(masses) - truth) <= 3 * error
    assert error < 0.05 * truth


@both_backends
def test_many_clusters_are_weighed_tile_by_tile(backend: str) -> None:
    """The largest logits come last, first and in the middle; some clusters are empty."""
    random = np.random.default_rng(5)
    query = random.standard_normal((3, 2, 16)).astype(np.float32)
    centroids = random.standard_normal((3, 300, 16)).astype(np.float32)
    values = random.standard_normal((3, 300, 8)).astype(np.float32)
    rise = np.linspace(0, 4, 300)[:, None]
    centroids[0] *= rise
    centroids[1] *= rise[::-1]
    sizes = random.integers(0, 4, (3, 300)).astype(np.float32)
    chosen = [random.permutation(300)[:n].tolist() for n in (300, 129, 64)]
    chosen[0].sort()
    chosen[1].sort()

    out, lse = attend_clusters(backend, query, centroids, values, sizes, chosen, 0.7)

    for row, own in enumerate(chosen):
        with np.errstate(divide="ignore"):
            often = np.log(sizes[row, own].astype(float))
        logits = query[row].astype(float) @ centroids[row, own].astype(float).T * 0.7 + often
        expected, expected_lse = weighted(logits, values[row, own].astype(float))
        np.testing.assert_allclose(out[row], expected, atol=2e-6)
        np.testing.assert_allclose(lse[row], expected_lse, atol=2e-6)


@both_backends
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_walk_with_room_for_all_finds_the_nearest(backend: str, count: int) -> None:
    """Every node leads to the next one, so that all are seen; -1 where there are no more."""
    random = np.random.default_rng(count)
    query = random.standard_normal((2, 3, 16)).astype(np.float32)
    vectors = random.standard_normal((2, 50, 16)).astype(np.float32)
    edges = np.full((2, 50, 4), -1, np.int32)
    edges[:, :, 0] = random.integers(0, 50, (2, 50))
    near, logits = np.full((2, 3, 8), 99, np.int32), np.full((2, 3, 8), np.nan, np.float32)
    if backend == "torch":
        estimate_reference.walk_graph(query, vectors, count, near, logits)
    else:
        kernels.walk_graph(query, vectors, edges, count, 50, near, logits)

    products = np.einsum("rqd,rnd->rqn", query.astype(float), vectors[:, :count].astype(float))
    k = min(8, count)
    expected = np.argsort(-products, axis=2)[..., :k]
    np.testing.assert_array_equal(near[..., :k], expected)
    np.testing.assert_allclose(
        logits[..., :k], np.take_along_axis(products, expected, 2), atol=1e-5
    )
    assert (near[..., k:] == -1).all()
    assert np.isneginf(logits[..., k:]).all()


def test_a_walk_looks_at_a_bounded_number_of_nodes() -> None:
    """What it may not reach is NaN, and would be seen."""
    graph = pytest.importorskip("tierstore.kernels.cpu.graph")
    nodes = 40 * graph.MOST_SEEN
    vectors = np.full((1, nodes, 1), np.nan, np.float32)
    # Entries, and what follows each of them, with ever larger products.
    for entry in range(8):
        first = entry * nodes // 8
        vectors[0, first : first + graph.MOST_SEEN + 64, 0] = np.arange(graph.MOST_SEEN + 64)
    edges = np.full((1, nodes, 2), -1, np.int32)
    near, logits = np.empty((1, 1, 4), np.int32), np.empty((1, 1, 4), np.float32)

    kernels.walk_graph(np.ones((1, 1, 1), np.float32), vectors, edges, nodes, 4, near, logits)

    assert np.isfinite(logits).all()
