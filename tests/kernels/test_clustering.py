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

    The starts are compared as they are, means by their directions.

    Returns the labels, and by how much the closest of all decisions was made.
    """
    centred, margin = points - points.mean(0), np.inf
    centroids = centred[np.floor((np.arange(clusters) + 0.5) * len(points) / clusters).astype(int)]
    for number in range(iterations + 1):
        lengths = np.linalg.norm(centroids, axis=1, keepdims=True)
        units = centroids / np.maximum(lengths, 1e-12) if number else centroids
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


def lloyd(points: Doubles, clusters: int, iterations: int) -> tuple[Labels, float]:
    """Nearest centroids from strided starts, and by how much the closest decision was made."""
    starts = np.floor((np.arange(clusters) + 0.5) * len(points) / clusters).astype(int)
    centroids, margin = points[starts], np.inf
    for _ in range(iterations + 1):
        distances = np.square(points[:, None] - centroids).sum(2)
        labels = distances.argmin(1)
        if clusters > 1:
            best = np.sort(distances, axis=1)
            margin = min(margin, float((best[:, 1] - best[:, 0]).min()))
        centroids = np.stack(
            [
                points[labels == c].mean(0) if (labels == c).any() else centroids[c]
                for c in range(clusters)
            ]
        )
    return labels, margin


@pytest.mark.parametrize("dim", [4, 20])
@given(st.integers(1, 40), st.data(), st.integers(0, 2**32 - 1))
def test_the_nearest_centroid_is_that_of_lloyd(
    dim: int, n: int, data: st.DataObject, seed: int
) -> None:
    clusters = data.draw(st.integers(1, n))
    points = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(seed))

    assignment, _ = kmeans(points, clusters, iterations=4, metric="l2")

    for row, labels in zip(points.double().numpy(), assignment.numpy(), strict=True):
        expected, margin = lloyd(row, clusters, 4)
        assume(margin > 1e-4)
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("metric", ["inner", "cosine", "l2"])
def test_segments_are_clustered_each_on_its_own(metric: str) -> None:
    points = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(4))

    labels, means = kmeans(points, 12, metric=metric, segments=3)

    for segment, part in enumerate(points.split(20, 1)):
        own, own_means = kmeans(part, 4, metric=metric)
        assert torch.equal(labels[:, segment * 20 : segment * 20 + 20], own + 4 * segment)
        assert torch.equal(means[:, segment * 4 : segment * 4 + 4], own_means)


def test_a_point_that_weighs_three_times_is_three_points() -> None:
    points = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(8))
    counts = torch.randint(1, 4, (40,), generator=torch.Generator().manual_seed(9))
    starts = (2 * torch.arange(5) + 1) * 40 // 10

    labels, means = kmeans(points, 5, metric="l2", weights=counts.float().expand(2, -1))

    for row, found, row_labels in zip(points.double(), means, labels, strict=True):
        repeated = row.repeat_interleave(counts, 0).numpy()
        centroids = row[starts].numpy()
        for _ in range(11):
            nearest = np.square(repeated[:, None] - centroids).sum(2).argmin(1)
            centroids = np.stack([repeated[nearest == c].mean(0) for c in range(5)])
        np.testing.assert_array_equal(row_labels.repeat_interleave(counts), nearest)
        np.testing.assert_allclose(found, centroids, atol=1e-5)


def test_weights_are_those_of_the_segments() -> None:
    points = torch.randn(1, 40, 3, generator=torch.Generator().manual_seed(10))
    weights = torch.rand(1, 40, generator=torch.Generator().manual_seed(11)) + 0.1

    _, means = kmeans(points, 6, metric="l2", segments=2, weights=weights)

    for half in (0, 1):
        own = slice(20 * half, 20 * half + 20)
        _, expected = kmeans(points[:, own], 3, metric="l2", weights=weights[:, own])
        assert torch.equal(means[:, 3 * half : 3 * half + 3], expected)


def test_length_does_not_count_for_the_cosine() -> None:
    points = torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(5))
    lengths = torch.arange(1, 51)[None, :, None]

    labels, means = kmeans(points, 6, metric="cosine", centre=False)
    stretched, stretched_means = kmeans(points * lengths, 6, metric="cosine", centre=False)

    assert torch.equal(labels, stretched)
    assert not torch.allclose(means, stretched_means)


def test_random_starts_are_the_same_each_time_and_not_strided() -> None:
    points = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(6))
    found = [
        kmeans(points, 9, iterations=0, init=init)[0] for init in ("random", "random", "strided")
    ]

    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_distances_beyond_float32_are_compared() -> None:
    points = torch.tensor([[[1e30], [2e30], [-1e30], [-2e30]]])

    labels, _ = kmeans(points, 2, metric="l2")

    assert labels.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"metric": "l1"}, "metric='l1'"),
        ({"init": "zeros"}, "init='zeros'"),
        ({"clusters": 0}, "clusters=0"),
        ({"clusters": 13}, "clusters=13"),
        ({"segments": 5}, "segments=5"),
        ({"segments": 3}, "segments=3"),
    ],
)
def test_settings_of_kmeans_are_checked(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kmeans(torch.zeros(1, 12, 2), **{"clusters": 4, **options})  # type: ignore[arg-type]
