"""Random stories that an attention engine is told, and what attention over them should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.attention import Geometry, SparseAttention

if TYPE_CHECKING:
    from tierstore.adapters.presets import Preset

SCALE = 0.21


class Story:
    """Random queries, keys and values of a model, and a float64 account of what attention gives."""

    def __init__(self, geometry: Geometry, sequences: int, seed: int = 0) -> None:
        self.geometry, self.sequences = geometry, sequences
        self.generator = torch.Generator().manual_seed(seed)
        empty = torch.zeros(
            sequences, geometry.kv_heads, 0, geometry.head_dim, dtype=geometry.dtype
        )
        self.keys = [empty.clone() for _ in range(geometry.layers)]
        self.values = [empty.clone() for _ in range(geometry.layers)]

    def _random(self, heads: int, tokens: int) -> torch.Tensor:
        shape = (self.sequences, heads, tokens, self.geometry.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.geometry.dtype)

    def tell(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of `tokens` new tokens, which are now part of the past."""
        query = self._random(self.geometry.query_heads, tokens)
        key, value = (self._random(self.geometry.kv_heads, tokens) for _ in range(2))
        self.keys[layer] = torch.cat([self.keys[layer], key], 2)
        self.values[layer] = torch.cat([self.values[layer], value], 2)
        return query, key, value

    def attention(
        self, layer: int, row: int, query: torch.Tensor, positions: list[int]
    ) -> np.ndarray:
        """Attention of the last query over those positions, [G, d] in float64."""
        sequence, head = divmod(row, self.geometry.kv_heads)
        group = self.geometry.query_heads // self.geometry.kv_heads
        q = query[sequence, head * group : (head + 1) * group, -1].double().numpy()
        k = self.keys[layer][sequence, head, positions].double().numpy()
        v = self.values[layer][sequence, head, positions].double().numpy()
        logits = q @ k.T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out: np.ndarray = (weights / weights.sum(1, keepdims=True)) @ v
        return out

    def masses(self, layer: int, row: int, query: torch.Tensor) -> np.ndarray:
        """Attention of the last queries to each token, summed over them."""
        sequence, head = divmod(row, self.geometry.kv_heads)
        group = self.geometry.query_heads // self.geometry.kv_heads
        q = query[sequence, head * group : (head + 1) * group, -1].double().numpy()
        logits = q @ self.keys[layer][sequence, head].double().numpy().T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        masses: np.ndarray = (weights / weights.sum(1, keepdims=True)).sum(0)
        return masses


def small(dtype: torch.dtype = torch.float32, layers: int = 2) -> Geometry:
    return Geometry(layers, 6, 2, 16, dtype, torch.device("cpu"))


def check_step(engine: SparseAttention, story: Story, tolerance: float) -> list[list[list[int]]]:
    """Run one token through every layer; returns the attended positions per layer and row."""
    group = story.geometry.query_heads // story.geometry.kv_heads
    reported = []
    for layer in range(story.geometry.layers):
        query, key, value = story.tell(layer, 1)
        out = engine.attend(layer, query, key, value, scale=SCALE)
        rows = engine.attended(layer)
        total = story.keys[layer].shape[2]
        for row, positions in enumerate(rows):
            assert len(set(positions)) == len(positions), "a token was attended twice"
            assert set(range(min(4, total))) <= set(positions), "a sink is missing"
            assert set(range(max(0, total - 64), total)) <= set(positions), (
                "local window incomplete"
            )
            expected = story.attention(layer, row, query, positions)
            sequence, head = divmod(row, story.geometry.kv_heads)
            found = out[sequence, 0, head * group : (head + 1) * group].double().numpy()
            np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)
        reported.append(rows)
    return reported


def prefilled(
    preset: str | Preset, story: Story, tokens: int, **options: object
) -> SparseAttention:
    engine = SparseAttention(story.geometry, preset=preset, record=True, **options)  # type: ignore[arg-type]
    for layer in range(story.geometry.layers):
        engine.attend(layer, *story.tell(layer, tokens), scale=SCALE)
    return engine
