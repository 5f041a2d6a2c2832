"""Batched k-means against its definition, in float64 NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tierstore.kernels.clustering import kmeans

Doubles = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


def cluster(points: torch.Tensor, clusters: int, iterations: int = 10) -> tuple[Labels, Doubles]:
    assignment, means = kmeans(points, clusters, iterations=iterations)
    assert assignment.shape == points.shape[:2]
    assert means.shape == (points.shape[0], clusters, points.shape[2])
    return assignment.numpy(), means.double().numpy()


def spherical_kmeans(points: Doubles, clusters: int, iterations: int) -> tuple[Labels, float]:
    """One set, as the documentation tells it: centre, strided starts, then assign and update.

    Returns the labels, and by how much the closest of all decisions was made.
    """
    centred, margin = points - points.mean(0), np.inf
    centroids = centred[np.arange(clusters) * len(points) // clusters]
    for _ in range(iterations + 1):
        units = centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
        similarity = centred @ units.T
        labels = similarity.argmax(1)
        if clusters > 1:
            best = np.sort(similarity, axis=1)
            margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
        centroids = np.stack(
            [
                centred[labels == c].mean(0) if (labels == c).any() else units[c]
                for c in range(clusters)
            ]
        )
    return labels, margin


@st.composite
def point_sets(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    points = torch.randn(rows, n, 8, generator=torch.Generator().manual_seed(seed))
    return points + 3, draw(st.integers(1, n))


@given(point_sets(), st.integers(1, 6))
def test_assignment_follows_the_algorithm_set_by_set(
    case: tuple[torch.Tensor, int], iterations: int
) -> None:
    points, clusters = case

    assignment, _ = cluster(points, clusters, iterations)

    for row, labels in zip(points.double().numpy(), assignment, strict=True):
        expected, margin = spherical_kmeans(row, clusters, iterations)
        assume(margin > 1e-4)
        np.testing.assert_array_equal(labels, expected)


@given(point_sets())
def test_means_are_those_of_the_points_as_given(case: tuple[torch.Tensor, int]) -> None:
    points, clusters = case

    assignment, means = cluster(points, clusters)

    assert assignment.min() >= 0
    assert assignment.max() < clusters
    for row, labels, found in zip(points.double().numpy(), assignment, means, strict=True):
        for c in set(labels.tolist()):
            np.testing.assert_allclose(found[c], row[labels == c].mean(0), rtol=1e-5, atol=1e-5)


def test_one_cluster_is_the_mean_of_all() -> None:
    points = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))

    assignment, means = cluster(points, 1)

    assert not assignment.any()
    np.testing.assert_allclose(means[:, 0], points.double().mean(1), rtol=1e-5, atol=1e-6)


def test_as_many_clusters_as_points_keep_every_point() -> None:
    points = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(1))

    assignment, means = cluster(points, 50)

    assert (assignment == np.arange(50)).all()
    np.testing.assert_allclose(means, points, rtol=1e-6)


@pytest.mark.parametrize("clusters", [1, 3, 7])
def test_identical_points_share_a_cluster_and_the_others_stay_finite(clusters: int) -> None:
    points = torch.full((2, 7, 4), 2.5)

    assignment, means = cluster(points, clusters)

    assert (assignment == assignment[:, :1]).all()
    np.testing.assert_allclose(means, 2.5)


def test_well_separated_directions_are_found() -> None:
    """Interleaved groups: strided starts hit each group once."""
    generator = torch.Generator().manual_seed(2)
    directions = torch.eye(4, 16) * 10
    group = torch.arange(80) % 4
    points = (directions[group] + torch.randn(80, 16, generator=generator) * 0.3)[
        torch.argsort(group, stable=True)
    ][None]

    assignment, means = cluster(points, 4)

    assert assignment[0].tolist() == sorted(group.tolist())
    np.testing.assert_allclose(means[0], directions, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_points_are_computed_in_single(dtype: torch.dtype) -> None:
    points = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(3)).to(dtype)

    assignment, means = cluster(points, 5)

    expected, expected_means = cluster(points.float(), 5)
    np.testing.assert_array_equal(assignment, expected)
    np.testing.assert_array_equal(means, expected_means)


@pytest.mark.parametrize("metric", ["inner", "cosine", "l2"])
@pytest.mark.parametrize("init", ["strided", "random"])
def test_every_point_ends_where_its_metric_says(metric: str, init: str) -> None:
    """Rounds until nothing moves: each point is then with the mean that is nearest to it."""
    points = torch.randn(2, 120, 6, generator=torch.Generator().manual_seed(4)).double() + 0.5

    assignment, _ = kmeans(points, 6, iterations=200, metric=metric, init=init, centre=False)

    for own, labels in zip(points.numpy(), assignment.numpy(), strict=True):
        compared = own / np.linalg.norm(own, axis=1, keepdims=True) if metric == "cosine" else own
        means = np.stack([compared[labels == c].mean(0) for c in range(6)])
        if metric == "l2":
            fit = -((compared[:, None] - means) ** 2).sum(-1)
        else:
            fit = compared @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
        assert (fit.max(1) - fit[np.arange(120), labels] < 1e-5).all()


def test_segments_are_clustered_by_themselves() -> None:
    points = torch.randn(2, 60, 4, generator=torch.Generator().manual_seed(5))

    assignment, means = kmeans(points, 12, segments=3)

    for segment in range(3):
        own = slice(segment * 20, segment * 20 + 20)
        expected, expected_means = kmeans(points[:, own], 4)
        assert torch.equal(assignment[:, own], expected + 4 * segment)
        torch.testing.assert_close(means[:, 4 * segment : 4 * segment + 4], expected_means)


def test_unknown_switches_are_refused() -> None:
    for switches in ({"metric": "dot"}, {"init": "first"}):
        with pytest.raises(ValueError, match="expected one of"):
            kmeans(torch.ones(1, 4, 2), 2, **switches)  # type: ignore[arg-type]
