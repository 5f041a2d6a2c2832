"""What keeping an index costs: building it during a prefill, and appending at any length."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.capture import capture
from tierstore.adapters.models import DEMO_MODEL, load_model
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.rounds import Measure, Ratio, alternate, listed
from tierstore.benchmarks.subject import Subject
from tierstore.indexers import (
    ChunkMeanIndex,
    GraphIndex,
    HierarchicalIndex,
    IndexShape,
    LSHIndex,
    PQIndex,
    ScoringIndex,
    WeightedPQIndex,
)
from tierstore.interfaces import IndexContext
from tierstore.kernels.element import to_tensor
from tierstore.memory import unlimited
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tierstore.benchmarks.rounds import Say
    from tierstore.traces.capture import Capture

TOKENS, STEPS = 7_000, 32
"""Of the prompt whose prefill is compared; of what comes later at once."""
LENGTHS = (8_192, 131_072)
_DIM = 128
_BUILT: Mapping[str, tuple[Callable[[IndexShape], ScoringIndex], int]] = {
    "weighted-pq": (WeightedPQIndex, 4),
    "hierarchical": (HierarchicalIndex, 4),
}
"""By name: the index, and tokens of a block. The first one is preset best's, then kvdrive's."""
_APPENDED: Mapping[str, tuple[Callable[[IndexShape], ScoringIndex], int]] = {
    "chunk-mean": (ChunkMeanIndex, 4),
    "hierarchical": (HierarchicalIndex, 4),
    "pq": (PQIndex, 4),
    "weighted-pq": (WeightedPQIndex, 4),
    "lsh": (LSHIndex, 4),
    "graph": (partial(GraphIndex, queries=256), 1),
}
_PREFILL = "prefill"

CONFIGURATIONS = {
    _PREFILL: f"prefill of {TOKENS:,} tokens by the demo model, with transformers' DynamicCache",
    **{name: f"building {name} for all layers of that" for name in _BUILT},
    **{
        f"{name} at {length:,}": f"appending {STEPS} tokens to {name} at {length:,}, one row"
        for name in _APPENDED
        for length in LENGTHS
    },
}


def build_measure(say: Say, rounds: int) -> Measure:
    """Seconds of the demo model's prefill, and of building each index from its keys."""
    say(f"loading {DEMO_MODEL}")
    loaded = load_model(DEMO_MODEL)
    text = real_text(loaded.tokenizer, TOKENS + 1)
    kept = capture(loaded.model, text, 1, window=16)
    subject = Subject(loaded.model, None)
    runs: dict[str, Callable[[int], float]] = {
        _PREFILL: lambda number: subject.prefill(text[:TOKENS]),
        **{name: partial(_build, kept, make, per) for name, (make, per) in _BUILT.items()},
    }
    found = alternate(
        runs,
        min(rounds, 3),
        lambda number, latest: say(f"build round {number}: {listed(latest)} s"),
    )
    return Measure("s", found)


def build_ratios(measure: str) -> list[Ratio]:
    """What building is of prefill."""
    return [
        Ratio(f"time to build {name} / prefill", measure, name, _PREFILL, at_most=0.05)
        for name in _BUILT
    ]


def append_measure(say: Say, rounds: int) -> Measure:
    """Milliseconds of appending tokens to indexes of different lengths."""
    runs: dict[str, Callable[[int], float]] = {}
    for name, (make, per_block) in _APPENDED.items():
        for length in LENGTHS:
            say(f"building {name} over {length:,} tokens")
            index = _index(make, 4, _DIM, per_block, 1)
            _extend(index, _keys(length))
            runs[f"{name} at {length:,}"] = partial(_append, index)
    found = alternate(
        runs, rounds, lambda number, latest: say(f"append round {number}: {listed(latest)} ms")
    )
    return Measure("ms", found)


def append_ratios(measure: str) -> list[Ratio]:
    """Whether it costs the same at any length."""
    short, long = (f"{length:,}" for length in LENGTHS)
    return [
        Ratio(f"appending to {name}, {long} / {short} tokens", measure, f"{name} at {long}",
              f"{name} at {short}", at_most=1.5)
        for name in _APPENDED
    ]  # fmt: skip


def _index(
    make: Callable[[IndexShape], ScoringIndex],
    group: int,
    dim: int,
    block_tokens: int,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
) -> ScoringIndex:
    memory = unlimited()
    shape = IndexShape(group, dim, dtype, block_tokens, dim**-0.5, memory, Scratch(memory))
    index = make(shape)
    index.add_rows(np.arange(rows, dtype=np.int32))
    return index


def _extend(index: ScoringIndex, keys: torch.Tensor, context: IndexContext | None = None) -> None:
    index.extend(slice(0, len(keys)), keys, keys, context or IndexContext())


def _keys(tokens: int) -> torch.Tensor:
    """Keys [1, n, d] that drift, around an offset."""
    random = torch.Generator().manual_seed(tokens)
    steps = torch.randn(1, tokens, _DIM, generator=random)
    drift = torch.randn(1, tokens // 32 + 1, _DIM, generator=random).repeat_interleave(32, 1)
    return (steps + 2 * drift[:, :tokens] + 3).bfloat16()


def _append(index: ScoringIndex, number: int) -> float:
    keys = _keys(STEPS)
    start = time.perf_counter()
    _extend(index, keys)
    return 1e3 * (time.perf_counter() - start)


def _build(
    kept: Capture, make: Callable[[IndexShape], ScoringIndex], block_tokens: int, number: int
) -> float:
    """Seconds for all layers, one after the other, as in a prefill."""
    tokens = TOKENS - TOKENS % block_tokens
    seconds = 0.0
    layers, heads, group, _, dim = kept.last_queries.shape
    for layer in range(layers):
        keys = to_tensor(kept.keys[layer])[:, :tokens]
        context = IndexContext(last_queries=to_tensor(kept.last_queries[layer]))
        index = _index(make, group, dim, block_tokens, heads, kept.dtype)
        start = time.perf_counter()
        _extend(index, keys, context)
        seconds += time.perf_counter() - start
    return seconds
