"""Keeping the keys, values and queries that pass through an attention engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention.forwarding import Forwarding

if TYPE_CHECKING:
    from tierstore.adapters.attention.engine import SparseAttention
    from tierstore.adapters.transformers.engine import AttentionEngine


class QueryRecorder(Forwarding):
    """An engine like the one it is given, which keeps what it is called with.

    For one sequence without padding; it holds all keys and values once more.

    Parameters
    ----------
    window: how many of the prompt's last queries to keep; those after the prompt are all kept.
    """

    def __init__(self, engine: AttentionEngine, window: int) -> None:
        super().__init__(engine)
        self._window = window
        self._forget()

    def on_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        is_prompt = not self._keys[layer]
        self.scale = scale
        self._keys[layer].append(key[0])
        self._values[layer].append(value[0])
        kept = query[0, :, -self._window :] if is_prompt else query[0]
        self._queries[layer].append(kept.clone())

    def keys(self) -> torch.Tensor:
        """Keys [layers, H, n, d] of all tokens so far."""
        return torch.stack([torch.cat(each, 1) for each in self._keys])

    def values(self) -> torch.Tensor:
        """Values [layers, H, n, e] of all tokens so far."""
        return torch.stack([torch.cat(each, 1) for each in self._values])

    def last_queries(self) -> torch.Tensor:
        """Queries [layers, Hq, w, d] of the last tokens of the prompt."""
        return torch.stack([each[0] for each in self._queries])

    def queries(self) -> torch.Tensor:
        """Queries [layers, Hq, T, d] of all tokens after the prompt."""
        return torch.stack([torch.cat(each[1:], 1) for each in self._queries])

    def replay(self, engine: SparseAttention) -> None:
        """Let another engine, still empty, absorb everything that is kept."""
        for layer, queries in enumerate(self._queries):
            key, value = (torch.cat(kept[layer], 1)[None] for kept in (self._keys, self._values))
            engine.absorb(layer, key, value, query=queries[0][None], scale=self.scale)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens, all of them after the prompt."""
        for kept in (self._keys, self._values, self._queries):
            for pieces in kept:
                _drop_last(pieces, tokens)
        super().crop(tokens)

    def reset(self) -> None:
        """Forget the text."""
        super().reset()
        self._forget()

    def _forget(self) -> None:
        layers = range(self.geometry.layers)
        self.scale = 1.0
        self._keys: list[list[torch.Tensor]] = [[] for _ in layers]
        self._values: list[list[torch.Tensor]] = [[] for _ in layers]
        self._queries: list[list[torch.Tensor]] = [[] for _ in layers]


def _drop_last(pieces: list[torch.Tensor], tokens: int) -> None:
    while tokens > 0:
        last = pieces.pop()
        left = last.shape[1] - tokens
        if left > 0:
            pieces.append(last[:, :left])
        tokens -= last.shape[1]
