"""What an index finds of the attention that a model really paid, and what the index costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.benchmarks.indexes import LOCAL, SINKS, blocks_of
from tierstore.errors import ConfigError
from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.kernels.element import to_array, to_tensor
from tierstore.memory import unlimited
from tierstore.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.benchmarks.indexes import Candidate
    from tierstore.interfaces import Ids, Index, Selection
    from tierstore.traces.capture import Capture

    Masses = npt.NDArray[np.float32]

_WHOLE = 32  # selectable tokens are a multiple, so that all block sizes see the same
_OBSERVATION = 16  # last queries that an index is shown, as presets do
_WARM_TOKENS = 256


@dataclass
class Recall:
    """What was found at each budget, and what it cost.

    mass: attention captured, relative to that of as many best tokens, one for each layer and KV
        head. recall: share of the best units that were selected. selected: tokens selected,
        relative to the budget.
    build_seconds: one for each layer. select_seconds: one for each step, all layers together.
    nbytes: of all layers, for each indexed token and KV head.
    """

    mass: dict[float, list[float]] = field(default_factory=dict)
    recall: dict[float, list[float]] = field(default_factory=dict)
    selected: dict[float, list[float]] = field(default_factory=dict)
    build_seconds: list[float] = field(default_factory=list)
    select_seconds: list[float] = field(default_factory=list)
    nbytes: float = 0.0


class Truth:
    """The attention of a captured text's steps to what can be selected.

    masses: for each layer, float32 [H, T, n], in the mean over the query heads of a KV head.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        selectable = capture.prompt_tokens - SINKS - LOCAL
        self.tokens = selectable // _WHOLE * _WHOLE
        if self.tokens < 4 * _WHOLE:
            raise ConfigError(
                f"a prompt of {capture.prompt_tokens} tokens: expected at least "
                f"{SINKS + LOCAL + 4 * _WHOLE}, so that something can be selected"
            )
        layers = range(len(capture.keys))
        self.masses: list[Masses] = [self._masses(layer) for layer in layers]
        self._sorted = [-np.sort(-mass, axis=-1) for mass in self.masses]

    def _masses(self, layer: int) -> Masses:
        capture = self.capture
        query = to_tensor(capture.queries[layer]).float()
        keys = to_tensor(capture.keys[layer]).float()
        logits = query @ keys[:, None].mT * capture.scale
        place = torch.arange(keys.shape[1])
        step = torch.arange(capture.steps)[:, None] + capture.prompt_tokens
        weights = logits.masked_fill(place > step, -torch.inf).softmax(-1)
        mass: Masses = weights[..., SINKS : SINKS + self.tokens].mean(1).numpy()
        return mass

    def budget(self, share: float, block_tokens: int) -> int:
        """Blocks that a share of the prompt is, of those that can be selected."""
        wanted = blocks_of(share, self.capture.prompt_tokens, block_tokens)
        return min(wanted, self.tokens // block_tokens)

    def best(self, layer: int, tokens: int) -> Masses:
        """Mass [H, T] of the best `tokens` tokens of each step."""
        mass: Masses = self._sorted[layer][..., :tokens].sum(-1)
        return mass


def measure_recall(
    truth: Truth, candidate: Candidate, block_tokens: int, budgets: Sequence[float]
) -> Recall:
    """Build the index of every layer, and let it select for the captured queries."""
    found = Recall()
    capture, layers = truth.capture, len(truth.masses)
    seconds = np.zeros(capture.steps)
    built_index(candidate, capture, 0, block_tokens, min(_WARM_TOKENS, truth.tokens))
    for layer in range(layers):
        start = perf_counter()
        index = built_index(candidate, capture, layer, block_tokens, truth.tokens)
        found.build_seconds.append(perf_counter() - start)
        heads = len(truth.masses[layer])
        found.nbytes += index.nbytes / (layers * heads * truth.tokens)
        for i, budget in enumerate(budgets):
            queries = to_tensor(capture.queries[layer])
            chosen, times = selected_blocks(truth, index, queries, block_tokens, budget)
            seconds += times if i == 0 else 0
            _judge(truth, layer, block_tokens, budget, chosen, found)
    found.select_seconds = seconds.tolist()
    return found


def built_index(
    candidate: Candidate, capture: Capture, layer: int, block_tokens: int, tokens: int
) -> Index:
    """An index of the first `tokens` tokens behind the sinks of a captured layer."""
    memory = unlimited("index")
    queries = capture.queries[layer]
    heads, group, _, dim = queries.shape
    shape = IndexShape(
        group, dim, capture.dtype, block_tokens, capture.scale, memory, Scratch(memory),
        heads=heads,
    )  # fmt: skip
    index = candidate.make(shape)
    index.add_rows(np.arange(heads, dtype=np.int32))
    part = slice(SINKS, SINKS + tokens)
    last = to_tensor(capture.last_queries[layer])[:, :, -_OBSERVATION:]
    index.extend(
        slice(0, heads),
        to_tensor(capture.keys[layer])[:, part],
        to_tensor(capture.values[layer])[:, part],
        IndexContext(0, last),
    )
    return index


def selected_blocks(
    truth: Truth, index: Index, queries: torch.Tensor, block_tokens: int, budget: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """What queries [H, G, T, d] select, [H, T, blocks], and the seconds of each step."""
    heads, _, steps, _ = queries.shape
    chosen = np.zeros((heads, steps, truth.tokens // block_tokens), np.bool_)
    budgets: Ids = np.full(heads, truth.budget(budget, block_tokens), np.int32)
    seconds = np.empty(steps)
    index.select(to_array(queries[:, :, 0].contiguous()), budgets)
    for step in range(steps):
        query = to_array(queries[:, :, step].contiguous())
        start = perf_counter()
        selection = index.select(query, budgets)
        seconds[step] = perf_counter() - start
        chosen[_row_numbers(selection), step, selection.ids] = True
    return chosen, seconds


def _row_numbers(selection: Selection) -> npt.NDArray[np.int64]:
    counts = np.diff(selection.row_ptr)
    return np.repeat(np.arange(len(counts)), counts)


def _judge(
    truth: Truth,
    layer: int,
    block_tokens: int,
    budget: float,
    chosen: npt.NDArray[np.bool_],
    found: Recall,
) -> None:
    """Add a layer's mass, recall and number of tokens."""
    mass = truth.masses[layer]
    blocks = mass.reshape(*mass.shape[:2], -1, block_tokens).sum(-1)
    count = truth.budget(budget, block_tokens)
    best = np.zeros_like(chosen)
    np.put_along_axis(best, np.argpartition(-blocks, count - 1, axis=-1)[..., :count], True, -1)
    captured = np.where(chosen, blocks, 0).sum((1, 2))
    perfect = truth.best(layer, truth.budget(budget, 1)).sum(1)
    found.mass.setdefault(budget, []).extend((captured / perfect).tolist())
    hits = (chosen & best).sum((1, 2)) / best.sum((1, 2))
    found.recall.setdefault(budget, []).extend(hits.tolist())
    selected = chosen.mean((1, 2)) / (count / blocks.shape[-1])
    found.selected.setdefault(budget, []).extend(selected.tolist())
