"""Rotary position embedding with tables given: channels j and j + h turn by an angle together."""

import torch


def rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first 2 h channels of vectors [..., n, d] by the angles of their positions.

    cos, sin: [n, h], 2 h <= d; channels behind stay as they are (partial rotary), and with h = 0
    all do. With ``-sin`` it turns back.
    """
    half = cos.shape[-1]
    first, second, rest = vectors.split([half, half, vectors.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
