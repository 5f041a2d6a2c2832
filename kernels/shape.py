"""The geometry of a KV block inside a row of elements."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`tokens` keys of `key_dim` elements, then, from element `value_offset` on, as many values."""

    tokens: int
    key_dim: int
    value_dim: int
    value_offset: int

    def keys_and_values(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [n, tokens, key_dim] and [n, tokens, value_dim] of blocks [n, elements]."""
        key_end = self.tokens * self.key_dim
        key = blocks[:, :key_end].unflatten(1, (self.tokens, self.key_dim))
        return key, self.values(blocks)

    def values(self, blocks: torch.Tensor) -> torch.Tensor:
        """A view [n, tokens, value_dim] of the values of blocks [n, elements]."""
        value_end = self.value_offset + self.tokens * self.value_dim
        value: torch.Tensor = blocks[:, self.value_offset : value_end].unflatten(
            1, (self.tokens, self.value_dim)
        )
        return value
