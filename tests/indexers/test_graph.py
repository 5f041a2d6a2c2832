"""The graph over keys: what a walk finds of what there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierstore.errors import ConfigError
from tierstore.indexers import GraphIndex, IndexShape
from tierstore.interfaces import IndexContext
from tierstore.kernels.graph import link_back, project, prune
from tierstore.memory import Memory
from tierstore.scratch import Scratch

DIM, GROUP = 32, 2


def make(keys: torch.Tensor, asked: torch.Tensor | None = None, **options: object) -> GraphIndex:
    memory = Memory(1 << 26)
    shape = IndexShape(GROUP, DIM, torch.float32, 1, DIM**-0.5, memory, Scratch(memory))
    index = GraphIndex(shape, **options)  # type: ignore[arg-type]
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    index.extend(slice(0, len(keys)), keys, keys, IndexContext(last_queries=asked))
    return index


def topics(tokens: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [1, n, d] around 40 topics and an offset; prefill queries [1, G, w, d]; later ones."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, DIM, generator=random)
    offset = 2 * torch.randn(DIM, generator=random)
    of_key = torch.randint(40, (tokens,), generator=random)
    keys = centres[of_key] + 0.6 * torch.randn(tokens, DIM, generator=random) + offset
    asked = centres[torch.randint(40, (GROUP * 532,), generator=random)]
    asked = 2 * (asked + 0.4 * torch.randn(GROUP * 532, DIM, generator=random)) - offset / 2
    asked = asked.view(1, GROUP, 532, DIM)
    return keys[None], asked[:, :, :512], asked[:, :, 512:]


def found_share(index: GraphIndex, keys: torch.Tensor, later: torch.Tensor, k: int) -> float:
    """Of the best k keys of each query, the share that its walk has seen."""
    hits = []
    for step in range(later.shape[2]):
        query = later[:, :, step]
        index.select(query.numpy(), np.array([k], np.int32))
        seen = np.empty((1, GROUP, keys.shape[1]), np.float32)
        index.logits(query.numpy(), seen)
        truth = (query[0].double() @ keys[0].double().T).numpy()
        for g in range(GROUP):
            best = np.argsort(-truth[g])[:k]
            hits.append(np.isfinite(seen[0, g, best]).mean())
    return float(np.mean(hits))


@pytest.mark.parametrize("given", [True, False], ids=["queries", "keys only"])
def test_a_walk_finds_most_of_the_best_keys_and_sees_few(given: bool) -> None:
    keys, queries, later = topics(4000, seed=0)
    index = make(keys, queries if given else None)

    share = found_share(index, keys, later, 50)

    seen = np.empty((1, GROUP, 4000), np.float32)
    index.logits(later[:, :, 0].numpy(), seen)
    assert share >= 0.9
    assert np.isfinite(seen).mean() < 0.5


def test_keys_that_come_later_are_found() -> None:
    keys, queries, later = topics(2000, seed=1)
    index = make(keys[:, :1500], queries)
    for first in range(1500, 2000, 100):
        more = keys[:, first : first + 100]
        index.extend(slice(0, 1), more, more, IndexContext())

    assert found_share(index, keys, later, 50) >= 0.9


def test_seen_keys_have_their_logits() -> None:
    keys, queries, later = topics(500, seed=2)
    index = make(keys, queries)
    query = later[:, :, 0]
    index.select(query.numpy(), np.array([20], np.int32))
    seen = np.empty((1, GROUP, 500), np.float32)
    index.logits(query.numpy(), seen)
    truth = (query[0].double() @ keys[0].double().T).numpy() * DIM**-0.5

    chosen = np.isfinite(seen[0])

    assert chosen.sum(1).min() >= 40
    np.testing.assert_allclose(seen[0][chosen], truth[chosen], atol=1e-5)


def test_the_oracle_sees_everything() -> None:
    keys, queries, later = topics(300, seed=3)
    index = make(keys, queries, is_exact=True)
    assert found_share(index, keys, later, 300) == 1
    selection = index.select(later[:, :, 0].numpy(), np.array([9], np.int32))
    truth = (later[0, :, 0].double() @ keys[0].double().T).numpy().max(0)
    assert sorted(selection.ids.tolist()) == sorted(np.argsort(-truth)[:9].tolist())
    assert selection.everything is None


def test_a_walk_with_room_for_all_reaches_all() -> None:
    """Also keys that are near to no query: each leads to the next one."""
    keys, queries, later = topics(700, seed=4)
    index = make(keys, queries, degree=1, neighbours=2)
    assert found_share(index, keys, later, 700) == 1


def test_pruning_keeps_the_nearest_and_what_it_does_not_stand_for() -> None:
    """On a line around node 0: 1 stands for 2 and 3; nothing nearer stands for 4."""
    vectors = np.array([[0.0], [1.0], [1.5], [3.0], [-2.0]], np.float32)
    edges = np.full((5, 3), -1, np.int32)

    prune(vectors, 0, np.array([3, 4, 2, 1], np.int32), edges)

    assert edges[0].tolist() == [1, 4, 2]


def test_keys_near_to_one_query_are_linked_through_the_nearest() -> None:
    vectors = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    edges = np.full((6, 4), -1, np.int32)

    project(vectors, np.array([[2, 0, 5], [1, 3, 0]], np.int32), 0, edges)

    linked = [sorted(set(own.tolist()) - {-1}) for own in edges]
    assert linked == [[1, 2], [0, 3], [0, 5], [1], [], [2]]


def test_links_go_both_ways_and_a_full_node_gives_up_its_last() -> None:
    edges = np.array([[1, 2], [0, -1], [0, -1], [0, 1]], np.int32)

    link_back(edges, 3)

    assert edges.tolist() == [[1, 3], [0, 3], [0, -1], [0, 1]]


def test_a_key_costs_itself_and_its_edges() -> None:
    keys, queries, _ = topics(400, seed=5)
    assert make(keys, queries).nbytes == 400 * (4 * DIM + 4 * 32) + 8


@pytest.mark.parametrize(
    "options", [{"degree": 0}, {"neighbours": 1}, {"queries": 0}, {"beam": 0.5}], ids=str
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        make(torch.ones(1, 4, DIM), **options)  # type: ignore[arg-type]
