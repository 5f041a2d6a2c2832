"""What stands for a page of keys: their mean, or the least box around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.kernels import reference
from tierstore.kernels.backend import elsewhere

if TYPE_CHECKING:
    from tierstore.kernels.element import Array

__all__ = ["page_bounds", "page_means"]


def page_means(keys: Array, page_tokens: int, out: Array) -> None:
    """The mean of the keys of each page; plain torch serves the CPU.

    Parameters
    ----------
    keys: [R, n, d] elements, n whole pages of `page_tokens`. out: float32 [R, n / page_tokens, d].
    """
    (elsewhere(keys) or reference).page_means(keys, page_tokens, out)


def page_bounds(keys: Array, page_tokens: int, high: Array, low: Array) -> None:
    """The largest and the smallest key of each page, channel by channel; on a CPU by plain torch.

    Parameters
    ----------
    keys: [R, n, d] elements, n whole pages of `page_tokens`.
    high, low: [R, n / page_tokens, d] of the same elements.
    """
    (elsewhere(keys) or reference).page_bounds(keys, page_tokens, high, low)
