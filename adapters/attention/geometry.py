"""The numbers of a model that attention needs."""

from dataclasses import dataclass

import torch

from tierstore.errors import ConfigError
from tierstore.kernels.element import SUPPORTED


@dataclass(frozen=True)
class Geometry:
    """Sizes of the layers that the engine holds, and where they compute.

    `value_dim` is the head dimension of values where it differs from that of keys.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.query_heads, self.kv_heads, self.head_dim) < 1:
            raise ConfigError(f"{self}: expected at least one of everything")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"query_heads={self.query_heads}: expected a multiple of kv_heads={self.kv_heads}"
            )
        if self.dtype not in SUPPORTED:
            raise ConfigError(
                f"dtype={self.dtype}: expected float32, float16 or bfloat16: load the model so"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens of one sequence, in all layers."""
        width = self.head_dim + self.value_size
        return tokens * self.layers * self.kv_heads * width * self.dtype.itemsize

    @property
    def value_size(self) -> int:
        """Head dimension of values."""
        return self.head_dim if self.value_dim is None else self.value_dim
