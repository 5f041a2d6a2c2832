"""Attention and unit masses in float64 NumPy, independent of every kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Stored = npt.NDArray[np.generic]

_PATTERN = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Largest relative error of rounding a number to each element type."""


def stored(values: npt.ArrayLike, dtype: torch.dtype) -> Stored:
    """`values` rounded to `dtype`, as the array of bit patterns that kernels take."""
    array: Stored = torch.tensor(np.asarray(values)).to(dtype).view(_PATTERN[dtype]).numpy()
    return array


def exactly(elements: Stored, dtype: torch.dtype) -> Floats:
    """The numbers that stored elements stand for."""
    values: Floats = torch.from_numpy(elements).view(dtype).double().numpy()
    return values


def log_sum_exp(logits: Floats, axis: int) -> Floats:
    """-inf for an empty axis and for one of nothing but -inf."""
    peak = logits.max(axis, keepdims=True, initial=-np.inf)
    safe = np.where(np.isneginf(peak), 0.0, peak)
    with np.errstate(divide="ignore"):
        total: Floats = np.squeeze(safe, axis) + np.log(np.exp(logits - safe).sum(axis))
    return total


def attention(query: Floats, keys: Floats, values: Floats, scale: float) -> tuple[Floats, Floats]:
    """Attention [G, e] of queries [G, d] over keys [n, d], and its log-sum-exp [G]."""
    logits = query @ keys.T * scale
    lse = log_sum_exp(logits, axis=1)
    weights = np.exp(logits - np.where(np.isneginf(lse), 0.0, lse)[:, None])
    return weights @ values, lse


def unit_scores(
    query: Floats,
    units: Floats,
    sizes: Floats,
    scale: float,
    aggregate: str,
    beside: Floats | None = None,
) -> Floats:
    """Log mass of one token of each unit [u]; in the softmax each counts `sizes` times.

    beside [G]: log-sum-exp of what else is in the softmax.
    """
    if not (sizes > 0).any():
        return np.full(len(sizes), -np.inf)
    logits = query @ units.T * scale
    repeated = np.where(sizes > 0, logits + np.log(np.maximum(sizes, 1e-300)), -np.inf)
    if beside is not None:
        repeated = np.concatenate([repeated, beside[:, None]], axis=1)
    mass = logits - log_sum_exp(repeated, axis=1)[:, None]
    combined = log_sum_exp(mass, axis=0) if aggregate == "sum" else mass.max(0)
    scores: Floats = np.where(sizes > 0, combined, -np.inf)
    return scores
