"""An attention engine that keeps everything and attends exactly: the oracle of adapter tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention.report import Report
from tierstore.adapters.transformers import TierCache, attach_engine, geometry_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from tierstore.adapters.attention.geometry import Geometry


def attach_dense(model: PreTrainedModel) -> TierCache:
    """Attach a model to a new engine of this kind."""
    return attach_engine(model, DenseEngine(geometry_of(model)))


class DenseEngine:
    """Keys and values as one tensor per layer and row; attention one row at a time."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.is_closed = False
        self.steps: list[tuple[int, int]] = []
        self._stored: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.reset()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        scale: float,
    ) -> torch.Tensor:
        self.steps.append((layer, query.shape[2]))
        stored = self._stored[layer]
        if not stored:
            stored.extend((key[row, :, :0], value[row, :, :0]) for row in range(len(query)))
        rows = []
        for row, (past_key, past_value) in enumerate(stored):
            is_text = torch.ones(query.shape[2], dtype=torch.bool) if valid is None else valid[row]
            keys = torch.cat([past_key, key[row][:, is_text]], dim=1)
            values = torch.cat([past_value, value[row][:, is_text]], dim=1)
            stored[row] = keys, values
            seen = past_key.shape[1] + is_text.cumsum(0)
            rows.append(exact_attention(query[row], keys, values, seen, scale))
        return torch.stack(rows)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._stored = [[stored[row] for row in rows] for stored in self._stored]

    def crop(self, tokens: int) -> None:
        self._stored = [
            [(keys[:, :-tokens], values[:, :-tokens]) for keys, values in stored]
            for stored in self._stored
        ]

    def reset(self) -> None:
        self._stored = [[] for _ in range(self.geometry.layers)]

    @property
    def tokens(self) -> list[int]:
        """Tokens that each row stores in the first layer."""
        return [keys.shape[1] for keys, _ in self._stored[0]]

    def report(self) -> Report:
        return Report(
            preset="dense",
            budget=1.0,
            context_tokens=max(self.tokens, default=0),
            block_tokens=1,
            window=None,
            selected_blocks=0,
            hit_rate=1.0,
            fetched_bytes=0,
            filtered_bytes=0,
            hysteresis=0.0,
            index_bytes=0,
            kernels="torch",
            tiers=(),
        )

    def close(self) -> None:
        self.is_closed = True


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one row, [tokens, query heads, value_dim].

    query is [query heads, tokens, head_dim], keys and values are [KV heads, stored, width]. Query i
    looks at the first ``seen[i]`` of them; where that is none, the output is zero.
    """
    grouped = query.unflatten(0, (keys.shape[0], -1)).double()
    scores = torch.einsum("hgtd,hnd->hgtn", grouped, keys.double()) * scale
    is_hidden = torch.arange(keys.shape[1]) >= seen[:, None]
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1).nan_to_num()
    output = torch.einsum("hgtn,hnd->hgtd", weights, values.double())
    return output.flatten(0, 1).transpose(0, 1).to(query.dtype)
