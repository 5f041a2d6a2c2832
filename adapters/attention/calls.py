"""Checks of what an engine is called with: ConfigError says what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.adapters.attention.geometry import Geometry


def check_query(
    geometry: Geometry, query: torch.Tensor, key: torch.Tensor, next_query: torch.Tensor | None
) -> None:
    """A query is one of the model's, and of as many sequences and tokens as the key.

    That of the next layer, where it is guessed, is one token of the same sequences.
    """
    if query.shape[1::2] != (geometry.query_heads, geometry.head_dim):
        raise ConfigError(
            f"query of shape {tuple(query.shape)}: expected [B, Hq, T, d] of {geometry}"
        )
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"query {tuple(query.shape)} beside key {tuple(key.shape)}: expected the same "
            "sequences and tokens in both"
        )
    one = (*query.shape[:2], 1, query.shape[3])
    if next_query is not None and (next_query.shape != one or next_query.dtype != query.dtype):
        raise ConfigError(
            f"next_query of shape {tuple(next_query.shape)}, {next_query.dtype}: expected {one}, "
            f"{query.dtype}, as the query"
        )


def check_valid(valid: torch.Tensor | None, key: torch.Tensor) -> None:
    """`valid` says of each new token whether it is text."""
    if valid is not None and (valid.dtype != torch.bool or valid.shape != key.shape[::2]):
        raise ConfigError(
            f"valid of shape {tuple(valid.shape)}, {valid.dtype}: expected bool "
            f"{tuple(key.shape[::2])}"
        )


def check_tokens(geometry: Geometry, key: torch.Tensor, value: torch.Tensor) -> None:
    """Keys and values are the model's."""
    if (
        key.shape[1::2] != (geometry.kv_heads, geometry.head_dim)
        or value.shape[1::2] != (geometry.kv_heads, geometry.value_size)
        or key.shape[:3] != value.shape[:3]
        or not key.dtype == value.dtype == geometry.dtype
    ):
        raise ConfigError(
            f"key {tuple(key.shape)} of {key.dtype} and value {tuple(value.shape)} of "
            f"{value.dtype}: expected [B, heads, T, dim] of {geometry}"
        )
