"""Keys, values and queries of no model, with some of the structure that those of models have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tierstore.adapters.attention import Geometry


class Token(NamedTuple):
    """A token in one layer: query [1, Hq, 1, d], key and value [1, Hkv, 1, .]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class SyntheticText:
    """A text without end, the same for the same seed.

    Keys of a region lie around a mean of their own, so that they cluster; the queries of a head
    drift from token to token, so that successive tokens attend to much the same.

    Parameters
    ----------
    region_tokens: tokens of a region.
    spread: standard deviation of keys around their region's mean; means have 1.
    memory: correlation of successive queries.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        region_tokens: int = 64,
        spread: float = 0.5,
        memory: float = 0.9,
    ) -> None:
        self._geometry = geometry
        self._generator = torch.Generator().manual_seed(seed)
        self._region_tokens, self._spread, self._memory = region_tokens, spread, memory
        self._queries = [self._normal(geometry.query_heads, 1) for _ in range(geometry.layers)]

    def context(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, Hkv, tokens, .] for a layer; other ones at each call."""
        heads = self._geometry.kv_heads
        means = self._normal(heads, -(-tokens // self._region_tokens))
        keys = means.repeat_interleave(self._region_tokens, dim=2)[:, :, :tokens]
        keys += self._spread * self._normal(heads, tokens)
        return self._stored(keys), self._stored(self._normal(heads, tokens, values=True))

    def step(self) -> list[Token]:
        """The next token in every layer."""
        heads, fresh = self._geometry.kv_heads, math.sqrt(1 - self._memory**2)
        step = []
        for query in self._queries:
            query.mul_(self._memory).add_(fresh * self._normal(*query.shape[1:3]))
            key, value = self._normal(heads, 1), self._normal(heads, 1, values=True)
            step.append(Token(*(self._stored(each) for each in (query, key, value))))
        return step

    def _normal(self, heads: int, tokens: int, *, values: bool = False) -> torch.Tensor:
        width = self._geometry.value_size if values else self._geometry.head_dim
        return torch.randn(1, heads, tokens, width, generator=self._generator)

    def _stored(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._geometry.dtype, copy=True)
