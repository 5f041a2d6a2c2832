"""Graphs over keys: from lists of near keys to few edges each.

Nodes of a graph have places for `degree` edges, int32 [n, degree], -1 where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.kernels.jit import njit

if TYPE_CHECKING:
    import numpy.typing as npt

    Edges = npt.NDArray[np.int32]
    Vectors = npt.NDArray[np.float32]


@njit
def _dot(a: Vectors, b: Vectors) -> np.float32:
    total = np.float32(0.0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@njit
def prune(vectors: Vectors, node: int, candidates: Edges, edges: Edges) -> None:
    """Give a node its edges: nearest candidates first, less those that a nearer one stands for.

    A candidate is occluded by an edge that is nearer to it (L2) than the node is; the occluded
    fill what places are left, nearest first. candidates: int32 [c], without `node`, distinct.
    """
    n, degree = len(candidates), edges.shape[1]
    distance = np.empty(n, np.float32)
    for i in range(n):
        away = vectors[candidates[i]] - vectors[node]
        distance[i] = _dot(away, away)
    order = np.argsort(distance)
    edges[node] = -1
    taken = np.zeros(n, np.bool_)
    used = 0
    for i in order:
        if used == degree:
            break
        occluded = False
        for e in range(used):
            away = vectors[candidates[i]] - vectors[edges[node, e]]
            if _dot(away, away) < distance[i]:
                occluded = True
                break
        if not occluded:
            edges[node, used] = candidates[i]
            taken[i] = True
            used += 1
    for i in order:
        if used < degree and not taken[i]:
            edges[node, used] = candidates[i]
            used += 1


@njit
def project(vectors: Vectors, near: Edges, first: int, edges: Edges) -> None:
    """From lists of keys near to a query each, int32 [q, k], edges between keys that share one.

    The nearest key of a list and its others become each other's candidates, of which `prune`
    leaves the best. Nodes below `first` keep the edges that they have.
    """
    n = len(edges)
    counts = np.zeros(n + 1, np.int64)
    for query in range(len(near)):
        counts[near[query, 0]] += near.shape[1] - 1
        for i in range(1, near.shape[1]):
            counts[near[query, i]] += 1
    starts = np.zeros(n + 1, np.int64)
    starts[1:] = np.cumsum(counts[:n])
    listed = np.empty(starts[n], np.int32)
    at = starts[:n].copy()
    for query in range(len(near)):
        hub = near[query, 0]
        for i in range(1, near.shape[1]):
            other = near[query, i]
            listed[at[hub]], listed[at[other]] = other, hub
            at[hub] += 1
            at[other] += 1
    for node in range(first, n):
        prune(vectors, node, np.unique(listed[starts[node] : starts[node + 1]]), edges)


@njit
def adopt(vectors: Vectors, nodes: Edges, near: Edges, edges: Edges) -> None:
    """Give each of `nodes`, int32 [q], its edges to some of ``near[i]``, int32 [q, k], -1 for none.

    What `prune` leaves; a node is no neighbour of its own.
    """
    for i in range(len(nodes)):
        wanted = (near[i] >= 0) & (near[i] != nodes[i])
        prune(vectors, nodes[i], near[i][wanted], edges)


@njit
def link_back(edges: Edges, first: int) -> None:
    """Let every neighbour of the nodes from `first` on know them too, in its last place if full."""
    degree = edges.shape[1]
    for node in range(first, len(edges)):
        for e in range(degree):
            other = edges[node, e]
            if other < 0:
                break
            place = 0
            while place < degree - 1 and edges[other, place] >= 0:
                if edges[other, place] == node:
                    break
                place += 1
            edges[other, place] = node
