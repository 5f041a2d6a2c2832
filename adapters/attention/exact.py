"""Exact attention for many queries at once: prefill, and later turns over a tiered past."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tierstore.kernels.reference import merge_partials, partial_attention

if TYPE_CHECKING:
    from collections.abc import Iterable

_QUERIES_AT_ONCE = 512

Piece = tuple[torch.Tensor, torch.Tensor]
"""Keys [Hkv, n, d] and values [Hkv, n, e] of one stretch of the past."""


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention with nothing before: query [B, Hq, T, d], key, value [B, Hkv, T, d]."""
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )


def over_past(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: Iterable[Piece], scale: float
) -> torch.Tensor:
    """Attention of new tokens over all of `past` and, causally, over themselves, in float32.

    query [Hq, T, d], key and value [Hkv, T, d]. Pieces of the past are asked for one by one, used
    and forgotten, so that no more than one is in memory. Returns [Hq, T, e] float32.
    """
    kv_heads, new = key.shape[:2]
    group = query.shape[0] // kv_heads
    rows = query.float().mul(scale).reshape(kv_heads, group, new, query.shape[-1])
    out = rows.new_zeros(*rows.shape[:-1], value.shape[-1])
    lse = rows.new_full(rows.shape[:-1], -torch.inf)
    for piece_key, piece_value in past:
        _attend_piece(rows, piece_key, piece_value, None, out, lse)
    visible = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()
    _attend_piece(rows, key, value, visible, out, lse)
    return out.reshape(query.shape[0], new, value.shape[-1])


def _attend_piece(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge attention over one piece into `out` and `lse`, some queries at a time."""
    k, v = key.float()[:, None], value.float()[:, None]
    for start in range(0, rows.shape[2], _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        mask = None if visible is None else visible[part]
        one, one_lse = partial_attention(rows[:, :, part], k, v, mask)
        out[:, :, part], lse[:, :, part] = merge_partials(
            out[:, :, part], lse[:, :, part], one, one_lse
        )


def importance(
    query: torch.Tensor, key: torch.Tensor, strip: torch.Tensor, block_tokens: int, scale: float
) -> torch.Tensor:
    """How much the last queries of a prompt attend to each block of its tokens.

    Parameters
    ----------
    query: [Hkv, G, w, d], those of the last w tokens.
    key: [Hkv, n, d], the tokens of the blocks, n a multiple of `block_tokens`.
    strip: [Hkv, m, d], the tokens that are attended beside them; the last w are the queries' own.

    Returns
    -------
    The attention mass [Hkv, n / block_tokens], summed over queries and tokens.
    """
    window, tokens = query.shape[2], strip.shape[1]
    # In float32, a CPU is done in half the time that 16 bits and their conversion take.
    flat = query.flatten(1, 2).float() * scale
    to_strip = (flat @ strip.float().transpose(1, 2)).unflatten(1, (-1, window))
    position = torch.arange(tokens, device=query.device)
    seen_last = torch.arange(tokens - window, tokens, device=query.device)
    to_strip = to_strip.masked_fill(position > seen_last[:, None], -torch.inf).flatten(1, 2)
    logits = torch.cat([to_strip, flat @ key.float().transpose(1, 2)], -1)
    mass = logits.softmax(-1)[..., tokens:].sum(1)
    of_blocks: torch.Tensor = mass.unflatten(-1, (-1, block_tokens)).sum(-1)
    return of_blocks
