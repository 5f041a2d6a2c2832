"""Clusters of tokens: RetroInfer's and ClusterKV's rules, and the zones of tripartite attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import attention, exactly, stored

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers import IndexShape, Rule, TokenClustersIndex
from tierstore.interfaces import IndexContext
from tierstore.memory import Memory
from tierstore.scratch import Scratch

DIM, GROUP = 16, 2
SCALE = DIM**-0.5


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(
    keys: torch.Tensor,
    values: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    block_tokens: int = 1,
    **options: object,
) -> TokenClustersIndex:
    memory = Memory(1 << 26)
    shape = IndexShape(GROUP, DIM, dtype, block_tokens, SCALE, memory, Scratch(memory))
    index = TokenClustersIndex(shape, **options)  # type: ignore[arg-type]
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    values = keys if values is None else values
    index.extend(slice(0, len(keys)), keys.to(dtype), values.to(dtype), IndexContext())
    return index


def test_clusters_are_a_sixteenth_in_multiples_of_eight_and_of_segments() -> None:
    for tokens, segment, expected in ((1024, 8192, 64), (1000, 8192, 64), (3000, 1000, 192)):
        index = make(randn(1, tokens, DIM, seed=0), segment_tokens=segment)
        assert index.units.tolist() == [expected]


@pytest.mark.parametrize("segment", [None, 200])
def test_centroids_and_value_means_are_those_of_members(segment: int | None) -> None:
    """After the last assignment over all clusters, which crosses segments."""
    keys, values = randn(2, 601, DIM, seed=1) + 2, randn(2, 601, 5, seed=2)
    state = make(keys, values, segment_tokens=segment, value_dim=5).state()
    crossing = False
    for row in range(2):
        unit_of = state["unit_of"][row, :601]
        for unit in range(int(state["units"][row])):
            own = np.flatnonzero(unit_of == unit)
            assert state["sizes"][row, unit] == len(own)
            crossing |= len(set(own // 200)) > 1
            for name, content in (("vectors", keys), ("values", values)):
                if len(own):
                    mean = content[row, own].double().numpy().mean(0)
                    np.testing.assert_allclose(state[name][row, unit], mean, atol=1e-5)
    assert crossing


def test_every_token_joins_the_cluster_of_largest_inner_product() -> None:
    """Directions before the last assignment are unknown, so clusters far apart tell."""
    centres = 10 * torch.eye(4, DIM)
    group = torch.arange(64) % 4
    keys = centres[group] + 0.1 * randn(64, DIM, seed=3)
    unit_of = make(keys[None], tokens_per_cluster=8).state()["unit_of"][0, :64]

    for unit in set(unit_of.tolist()):
        assert len(set(group[unit_of == unit].tolist())) == 1


def test_the_softmax_is_over_clusters_and_the_heads_are_summed() -> None:
    keys = randn(1, 640, DIM, seed=4)
    index, query = make(keys), randn(1, GROUP, DIM, seed=5)
    found = index.select(query.numpy(), np.array([5], np.int32)).everything
    assert found is not None
    state, units = index.state(), int(index.units[0])
    live = state["sizes"][0, :units].astype(float) > 0
    logits = query[0].double().numpy() @ state["vectors"][0, :units].astype(float).T * SCALE
    weights = np.exp(logits) * live
    with np.errstate(divide="ignore"):
        expected = np.log((weights / weights.sum(1, keepdims=True)).sum(0))

    np.testing.assert_allclose(found.unit_scores[0, :units], expected, atol=1e-5)


def test_clusterkv_cuts_its_last_cluster() -> None:
    """All of the best cluster, then as much of the second as the budget leaves."""
    centres = torch.stack([10 * torch.eye(DIM)[0], 10 * torch.eye(DIM)[1]])
    keys = centres.repeat_interleave(20, 0) + 0.1 * randn(40, DIM, seed=6)
    index = make(
        keys[None], tokens_per_cluster=20, segment_tokens=None, iterations=20, metric="cosine",
        init="random", is_global=False, refresh=320, rule=Rule("per_query", softmax=False),
    )  # fmt: skip
    query = centres[1].expand(1, GROUP, DIM) + 0.5 * centres[0]

    ids = index.select(query.numpy(), np.array([23], np.int32)).ids.tolist()

    assert index.refresh_tokens == 320
    assert sorted(ids) == [0, 1, 2, *range(20, 40)]


def test_later_tokens_are_clustered_alone() -> None:
    index = make(randn(1, 320, DIM, seed=7), new_tokens_per_cluster=40)
    before = int(index.units[0])
    more = randn(1, 320, DIM, seed=8)

    index.extend(slice(0, 1), more, more, IndexContext())

    assert int(index.units[0]) == before + 8
    assert index.data["unit_of"][0, 320:640].min() >= before


@pytest.mark.parametrize("tokens_per_cluster", [1, 8])
def test_three_zones_cover_all_tokens_once(tokens_per_cluster: int) -> None:
    """Clusters of one token make the estimate exact: the three zones are full attention."""
    keys, values = randn(2, 96, DIM, seed=9), randn(2, 96, 6, seed=10)
    query = randn(2, GROUP, DIM, seed=11)
    index = make(
        keys, values, value_dim=6, tokens_per_cluster=tokens_per_cluster, segment_tokens=None
    )
    selection = index.select(query.numpy(), np.array([9, 20], np.int32))
    taken = np.split(selection.ids.copy(), selection.row_ptr[1:-1])

    row_ptr, units = index.estimation_zone(selection, 1000)

    out, lse = np.zeros((2, GROUP, 6), np.float32), np.zeros((2, GROUP), np.float32)
    for row in range(2):
        part = attention(
            query[row].double().numpy(), keys[row, taken[row]].double().numpy(),
            values[row, taken[row]].double().numpy(), SCALE,
        )  # fmt: skip
        out[row], lse[row] = part
        unit_of = index.data["unit_of"][row]
        own = units[row_ptr[row] : row_ptr[row + 1]].tolist()
        assert not set(own) & set(unit_of[taken[row]].tolist())
        covered = set(own) | set(unit_of[taken[row]].tolist())
        assert covered == set(unit_of[:96].tolist())
    kernels.attend_clusters(
        query.numpy(), index.data["vectors"], index.data["values"], index.data["sizes"], row_ptr,
        units, SCALE, out, lse, merge=True,
    )  # fmt: skip
    for row in range(2):
        q, k, v = (x[row].double().numpy() for x in (query, keys, values))
        expected, full = attention(q, k, v, SCALE)
        if tokens_per_cluster == 1:
            np.testing.assert_allclose(out[row], expected, atol=1e-5)
            np.testing.assert_allclose(lse[row], full, atol=1e-5)
        else:
            assert (lse[row] <= full + 1e-5).all()


def test_the_zone_is_the_next_best_clusters() -> None:
    keys = randn(1, 128, DIM, seed=12)
    index = make(keys, value_dim=DIM)
    selection = index.select(randn(1, GROUP, DIM, seed=13).numpy(), np.array([3], np.int32))
    assert selection.everything is not None
    scores = selection.everything.unit_scores[0, : index.units[0]].copy()
    scores[index.data["unit_of"][0, selection.ids]] = -np.inf

    _, units = index.estimation_zone(selection, 3)

    assert sorted(units.tolist()) == sorted(np.argsort(-scores)[:3].tolist())


def test_a_zone_needs_whole_clusters_and_values() -> None:
    keys = randn(1, 64, DIM, seed=14)
    for index in (make(keys), make(keys, value_dim=DIM, block_tokens=4)):
        selection = index.select(randn(1, GROUP, DIM, seed=15).numpy(), np.array([3], np.int32))
        with pytest.raises(ConfigError, match="blocks of 1 token"):
            index.estimation_zone(selection, 3)


def test_its_bytes_are_means_sizes_and_member_lists() -> None:
    """2 vectors of 16 bits and 8 bytes a cluster; 4 a token; a row has 8. RetroInfer: 32 B."""
    keys = randn(1, 4096, DIM, seed=16)
    index = make(keys, dtype=torch.bfloat16, value_dim=DIM)

    assert index.nbytes == 256 * (4 * DIM + 8) + 4096 * 4 + 8
    state = index.state()
    mean = keys[0, state["unit_of"][0] == 7].bfloat16().double().mean(0)
    np.testing.assert_allclose(
        exactly(state["vectors"][0, 7], torch.bfloat16), mean, rtol=2**-8, atol=1e-6
    )


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_cluster": 0.5},
        {"iterations": 0},
        {"metric": "dot"},
        {"init": "first"},
        {"refresh": -1},
        {"value_dim": -1},
        {"segment_tokens": 0},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        make(randn(1, 8, DIM, seed=0), **options)  # type: ignore[arg-type]


def test_one_token_is_a_cluster() -> None:
    key = randn(1, 1, DIM, seed=17)
    index = make(key)
    query = stored(randn(1, GROUP, DIM, seed=18), torch.float32)
    assert index.select(query, np.array([4], np.int32)).ids.tolist() == [0]
