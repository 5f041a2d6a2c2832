"""Operations reach Triton's kernels when their arrays are on a device, and so do the indexes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from on_device import INTERPRETED, MARKS, DeviceArray, there
from oracles import stored

from tierstore import kernels
from tierstore.arrays import device_memory
from tierstore.indexers import (
    ChunkMeanIndex,
    ExactIndex,
    GraphIndex,
    HierarchicalIndex,
    IndexShape,
    LSHIndex,
    PartialColumnsIndex,
    PQIndex,
    QuestIndex,
    ScoringIndex,
    ShadowKVIndex,
    StatisticalBoxIndex,
    TokenClustersIndex,
    WeightedPQIndex,
    scoring,
)
from tierstore.interfaces import IndexContext
from tierstore.kernels import backend, clustering, element, reference, triton
from tierstore.memory import Memory
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tierstore.kernels.element import Array

pytestmark = MARKS

# The sizes of the conformance suite, for which kernels of the host are compiled anyway.
ROWS, GROUP, DIM, BLOCK_TOKENS, BLOCKS, LATER = 2, 3, 8, 4, 20, 3
DTYPE = torch.bfloat16

BY_NAME = {"gather_blocks", "judge", "merge_parts"}
"""What no operation calls yet, and a part of one."""

K_MEANS = {"nearest_centroids", "cluster_sums"}

# What each index has a device do beside combining heads, and how far its scores may be off those of
# the CPU: rounding, or, of lookup tables, what a CPU rounds to bytes.
INDEXES: dict[str, tuple[type[ScoringIndex], dict[str, Any], set[str], float]] = {
    "chunk mean": (ChunkMeanIndex, {}, {"page_means", "dot_logits"}, 1e-4),
    "exact": (ExactIndex, {}, {"dot_logits"}, 1e-4),
    "quest": (QuestIndex, {}, {"page_bounds", "box_logits"}, 1e-4),
    "box": (StatisticalBoxIndex, {}, {"page_bounds", "box_logits"}, 1e-4),
    "shadow": (ShadowKVIndex, {"outliers": 2}, {"page_means", "dot_logits"}, 1e-4),
    "hierarchical": (HierarchicalIndex, {}, {"page_means", "dot_logits", *K_MEANS}, 1e-4),
    "token clusters": (
        TokenClustersIndex, {"value_dim": DIM, "iterations": 2}, {"dot_logits", *K_MEANS}, 1e-4,
    ),
    "pq": (PQIndex, {"bits": 3, "iterations": 2}, {"pack_codes", "pq_logits", *K_MEANS}, 0.05),
    "pq of inner products": (
        PQIndex, {"bits": 3, "iterations": 2, "metric": "inner"},
        {"pack_codes", "pq_logits", *K_MEANS}, 0.05,
    ),
    "weighted pq": (
        WeightedPQIndex, {"bits": 3, "iterations": 2, "dims": 8, "parts": 4},
        {"pack_codes", "pq_logits", "dot_logits", *K_MEANS}, 0.1,
    ),
    "lsh": (LSHIndex, {"bits": 4, "tables": 8}, set(), 1e-4),
    "columns": (PartialColumnsIndex, {}, {"dot_logits"}, 1e-4),
    "graph": (GraphIndex, {"degree": 8, "neighbours": 8, "is_exact": True}, {"dot_logits"}, 1e-4),
}  # fmt: skip


@pytest.mark.parametrize("expected", [triton, reference], ids=["triton", "torch"])
@pytest.mark.parametrize("name", sorted({*triton.__all__} - BY_NAME))
def test_an_operation_is_done_where_its_arrays_are(
    name: str, expected: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain torch where Triton is missing."""
    done = []

    def noting(module: ModuleType) -> Callable[..., int]:
        def operation(*_: object, **__: object) -> int:
            done.append(module)
            return 0

        return operation

    for module in (triton, reference):
        monkeypatch.setattr(module, name, noting(module))
    if expected is reference:
        monkeypatch.setattr(backend, "_triton", lambda: None)
    operation = getattr(kernels, name)
    kinds = [parameter.kind for parameter in inspect.signature(operation).parameters.values()]
    array = there(np.zeros((1, 1, 1, 1), np.float32))

    operation(*[array] * kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD))

    assert done == [expected]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of Triton operations that were called."""
    names: set[str] = set()

    def recording(name: str, operation: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            names.add(name)
            return operation(*arguments, **options)

        return run

    for name in triton.__all__:
        monkeypatch.setattr(triton, name, recording(name, getattr(triton, name)))
    return names


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Brings tensors to the device. Where memory plays it, all tensors of an index are there."""
    if not INTERPRETED:
        return lambda tensor: tensor.cuda()

    def to_array(tensor: torch.Tensor) -> DeviceArray:
        return DeviceArray(element.to_array(tensor))

    for module in (clustering, scoring):
        monkeypatch.setattr(module, "to_array", to_array)
    return lambda tensor: tensor


def memory_of_device() -> Memory:
    if not INTERPRETED:
        return device_memory(torch.device("cuda"), 1 << 26, "device")
    return Memory(1 << 26, "device", allocate=lambda shape, dtype: there(np.zeros(shape, dtype)))


def shape_in(memory: Memory) -> IndexShape:
    """An index that lives in `memory` and keeps its lists on the host."""
    host = Memory(1 << 26)
    return IndexShape(
        GROUP, DIM, DTYPE, BLOCK_TOKENS, 0.35, memory, Scratch(memory), host, Scratch(host),
        heads=ROWS,
    )  # fmt: skip


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def score_of_blocks(index: ScoringIndex, query: Array, blocks: int) -> np.ndarray[Any, Any]:
    """Scores [R, blocks], found by selecting all of them."""
    selection = index.select(query, np.full(ROWS, blocks, np.int32))
    rows = np.repeat(np.arange(ROWS), blocks)
    assert selection.row_ptr.tolist() == [0, blocks, ROWS * blocks]
    scores = np.full((ROWS, blocks), np.nan)
    scores[rows, selection.ids] = selection.scores
    return scores


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_on_a_device_scores_as_one_on_the_host(
    name: str, called: set[str], on_device: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Built, appended to and asked there; its state then moves to the host."""
    kind, options, operations, tolerance = INDEXES[name]
    index = kind(shape_in(memory_of_device()), **options)
    index.add_rows(np.arange(ROWS, dtype=np.int32))
    for blocks in (BLOCKS, LATER):
        keys, values = (
            on_device(randn(ROWS, blocks * BLOCK_TOKENS, DIM, seed=seed + blocks))
            for seed in (0, 9)
        )
        last = on_device(randn(ROWS, GROUP, 5, DIM, seed=7)) if blocks == BLOCKS else None
        index.extend(slice(0, ROWS), keys, values, IndexContext(last_queries=last))
    query = stored(randn(ROWS, GROUP, DIM, seed=3).float(), DTYPE)

    found = score_of_blocks(index, there(query), BLOCKS + LATER)

    assert called == {*operations, "combine_heads"}
    host = kind(shape_in(Memory(1 << 26)), **options).restore(index.state())
    expected = score_of_blocks(host, query, BLOCKS + LATER)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=tolerance)
    again = kind(shape_in(memory_of_device()), **options).restore(host.state())
    np.testing.assert_array_equal(score_of_blocks(again, there(query), BLOCKS + LATER), found)
