"""Best-first search of a graph over keys."""

from functools import lru_cache

import numpy as np
from numba import njit

from tierstore.kernels.cpu.parts import known
from tierstore.kernels.cpu.scalar import FAST, widen

_ENTRIES = 8
MOST_SEEN = 4096
"""Nodes that a walk looks at, about: what it costs does not grow with the graph."""

_MINUS_INFINITY = np.float32(-np.inf)


@njit(inline="always")
def _enter(score, node, scores, nodes, expanded, used):
    """Enter a node into the best ones seen, best first; where it stands, and how many they are."""
    room = len(scores)
    if used == room and score <= scores[room - 1]:
        return room, used
    low, high = 0, used
    while low < high:
        middle = (low + high) // 2
        if scores[middle] >= score:
            low = middle + 1
        else:
            high = middle
    last = min(used, room - 1)
    for i in range(last, low, -1):
        scores[i], nodes[i], expanded[i] = scores[i - 1], nodes[i - 1], expanded[i - 1]
    scores[low], nodes[low], expanded[low] = score, node, False
    return low, last + 1


@lru_cache(maxsize=64)
def _logit_of(dim):
    @njit(cache=True, nogil=True, fastmath=FAST)
    def logit_of(q, vector):
        total = np.float32(0.0)
        for j in range(dim):
            total += q[j] * widen(vector[j])
        return total

    return known(logit_of)


@lru_cache(maxsize=64)
def search_kernel(group, dim, degree):
    """Search for one shape; see `tierstore.kernels.search_graph` for the contract."""

    logit_of = _logit_of(dim)

    @njit(cache=True, nogil=True)
    def search(q, vectors, edges, n, seen, scores, nodes, expanded):
        used = 0
        for i in range(min(_ENTRIES, n)):
            node = i * n // min(_ENTRIES, n)
            seen[node] = logit_of(q, vectors[node])
            _, used = _enter(seen[node], node, scores, nodes, expanded, used)
        at = 0
        while at < used:
            if expanded[at]:
                at += 1
                continue
            expanded[at] = True
            node, back = nodes[at], at + 1
            for e in range(-1, degree):
                other = node + 1 if e < 0 else edges[node, e]
                if other < 0:
                    break
                if other >= n or seen[other] > _MINUS_INFINITY:
                    continue
                seen[other] = logit_of(q, vectors[other])
                where, used = _enter(seen[other], other, scores, nodes, expanded, used)
                back = min(back, where)
            at = back

    @njit(cache=True, nogil=True)
    def search_rows(query, vectors, edges, first_row, last_row, counts, beams, scale, out):
        q = np.empty(dim, np.float32)
        for row in range(first_row, last_row):
            n = counts[row]
            beam = min(beams[row], n)
            scores = np.empty(beam, np.float32)
            nodes = np.empty(beam, np.int32)
            expanded = np.empty(beam, np.bool_)
            for g in range(group):
                out[row, g, :n] = _MINUS_INFINITY
                if beam == 0:
                    continue
                for j in range(dim):
                    q[j] = widen(query[row, g, j]) * scale
                search(q, vectors[row], edges[row], n, out[row, g], scores, nodes, expanded)

    return search_rows


@njit(inline="always")
def _is_new(table, node):
    """Enter a node into a hash table of nodes, -1 where it is empty; False if it was there."""
    mask = len(table) - 1
    at = (node * 0x9E3779B1 >> 12) & mask
    while table[at] >= 0:
        if table[at] == node:
            return False
        at = (at + 1) & mask
    table[at] = node
    return True


@lru_cache(maxsize=64)
def walk_kernel(dim, degree):
    """Walks for one shape; see `tierstore.kernels.walk_graph` for the contract."""
    logit_of = _logit_of(dim)

    @njit(cache=True, nogil=True)
    def walk(q, vectors, edges, n, table, scores, nodes, expanded):
        table[:] = -1
        seen, used = 0, 0
        for i in range(min(_ENTRIES, n)):
            node = i * n // min(_ENTRIES, n)
            if _is_new(table, node):
                logit = logit_of(q, vectors[node])
                _, used = _enter(logit, node, scores, nodes, expanded, used)
        at = 0
        while at < used and seen < MOST_SEEN:
            if expanded[at]:
                at += 1
                continue
            expanded[at] = True
            node, back = nodes[at], at + 1
            for e in range(-1, degree):
                other = node + 1 if e < 0 else edges[node, e]
                if other < 0:
                    break
                if other >= n or not _is_new(table, other):
                    continue
                seen += 1
                logit = logit_of(q, vectors[other])
                where, used = _enter(logit, other, scores, nodes, expanded, used)
                back = min(back, where)
            at = back

    @njit(cache=True, nogil=True)
    def walk_rows(query, vectors, edges, n, beam, first_row, last_row, near, logits):
        q = np.empty(dim, np.float32)
        # The nodes of one expansion more than `MOST_SEEN`, and half of the places stay empty.
        table = np.empty(4 * MOST_SEEN, np.int32)
        scores = np.empty(beam, np.float32)
        nodes = np.empty(beam, np.int32)
        expanded = np.empty(beam, np.bool_)
        for row in range(first_row, last_row):
            for i in range(query.shape[1]):
                for j in range(dim):
                    q[j] = widen(query[row, i, j])
                scores[:], nodes[:] = _MINUS_INFINITY, -1
                walk(q, vectors[row], edges[row], n, table, scores, nodes, expanded)
                near[row, i] = nodes[: near.shape[2]]
                logits[row, i] = scores[: near.shape[2]]

    return walk_rows
