"""Sequences of random tokens that join and leave an engine, and exact attention to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.adapters.attention import Geometry
from tierstore.adapters.presets import Preset
from tierstore.indexers import ExactIndex, HierarchicalIndex
from tierstore.policies import LRU, Lookahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention import SparseAttention

LAYERS, QUERY_HEADS, KV_HEADS, DIM, SCALE = 2, 4, 2, 16, 0.25
GEOMETRY = Geometry(LAYERS, QUERY_HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))

EXACT = Preset("exact-small", ExactIndex, LRU, sinks=4, local=8, budget=0.3)
KVDRIVE = Preset(
    "kvdrive-small", HierarchicalIndex, Lookahead, sinks=4, local=8, budget=0.3,
    attends_residents=True,
)  # fmt: skip


class Tokens(NamedTuple):
    """Queries [layers, Hq, n, d], keys and values [layers, Hkv, n, d] of some tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Text:
    """A text without end, the same for the same seed, and its attention in float64."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.keys = np.zeros((LAYERS, KV_HEADS, 0, DIM))
        self.values = np.zeros((LAYERS, KV_HEADS, 0, DIM))

    def __len__(self) -> int:
        return self.keys.shape[2]

    def more(self, count: int) -> Tokens:
        """The next tokens, which belong to the text from now on."""
        query, key, value = (
            torch.randn(LAYERS, heads, count, DIM, generator=self._random)
            for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
        )
        self.keys = np.concatenate([self.keys, key.double().numpy()], 2)
        self.values = np.concatenate([self.values, value.double().numpy()], 2)
        return Tokens(query, key, value)

    def cut(self, count: int) -> None:
        """Forget the last tokens."""
        left = len(self) - count
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]

    def attention(self, layer: int, query: torch.Tensor) -> np.ndarray:
        """Of the last n tokens' queries [Hq, n, d] over all of the text: [n, Hq, d] float64."""
        n, group = query.shape[1], QUERY_HEADS // KV_HEADS
        out = np.empty((n, QUERY_HEADS, DIM))
        for head in range(QUERY_HEADS):
            keys, values = self.keys[layer, head // group], self.values[layer, head // group]
            for i in range(n):
                seen = len(self) - n + i + 1
                logits = keys[:seen] @ query[head, i].double().numpy() * SCALE
                weights = np.exp(logits - logits.max())
                out[i, head] = weights @ values[:seen] / weights.sum()
        return out


def prefill(engine: SparseAttention, sequence: int, tokens: Tokens) -> list[torch.Tensor]:
    """A prompt in every layer: outputs [n, Hq, d]."""
    return [
        engine.attend(
            layer, tokens.query[layer][None], tokens.key[layer][None], tokens.value[layer][None],
            sequences=[sequence], scale=SCALE,
        )[0]
        for layer in range(LAYERS)
    ]  # fmt: skip


def step(
    engine: SparseAttention, tokens: Sequence[Tokens], sequences: Sequence[int] | None = None
) -> torch.Tensor:
    """One token of each sequence in every layer: outputs [layers, B, Hq, d].

    What the next layer will ask is always guessed right.
    """
    out = []
    for layer in range(LAYERS):
        query, key, value = (
            torch.stack([each[part][layer] for each in tokens]) for part in range(3)
        )
        is_last = layer + 1 == LAYERS
        guess = None if is_last else torch.stack([each.query[layer + 1] for each in tokens])
        part = engine.step(
            layer, query, key, value, sequences=sequences, scale=SCALE, next_query=guess
        )
        out.append(part[:, 0])
    return torch.stack(out)
