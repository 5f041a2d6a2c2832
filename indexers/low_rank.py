"""Keys of a sequence as a product of few columns, from which kernels rebuild them (ShadowKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from tierstore.errors import ConfigError
from tierstore.kernels.element import to_array, to_tensor
from tierstore.kernels.rotary import rotate

if TYPE_CHECKING:
    from tierstore.kernels.element import Array


@dataclass(frozen=True, eq=False)
class LowRankKeys:
    """Keys ``left[t] @ right[h]`` of one sequence, turned by ``cos[t]`` and ``sin[t]``.

    ShadowKV's U is orthonormal and its SV has the scale; here `right` is orthonormal over all heads
    and `left` has the scale, which is the same product.

    Attributes
    ----------
    left: elements [n, k], shared by the heads. right: elements [H, k, d].
    cos, sin: float32 [n, h] of the tokens' positions; h = 0 for keys factorised as they are.
    """

    left: Array
    right: Array
    cos: Array
    sin: Array

    @classmethod
    def of(
        cls,
        keys: torch.Tensor,
        *,
        rank: int = 160,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> Self:
        """The product of rank `rank` that is nearest to keys [H, n, d], as the cache holds them.

        cos, sin: [n, h], 2 h <= d: the rotary tables that the keys were turned by; they are turned
        back first, since keys at the same angle have the lower rank.
        """
        heads, n, dim = keys.shape
        if not 1 <= rank <= heads * dim:
            raise ConfigError(f"rank={rank}: expected 1 to {heads * dim}, the heads' dimensions")
        none = keys.new_empty(n, 0, dtype=torch.float32)
        cos, sin = none if cos is None else cos.float(), none if sin is None else sin.float()
        if cos.shape != sin.shape or len(cos) != n or 2 * cos.shape[1] > dim:
            raise ConfigError(
                f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: expected both [{n}, h], with h "
                f"of at most {dim // 2}: a row for each key"
            )
        plain = rotate(keys.float(), cos, -sin).transpose(0, 1).reshape(n, heads * dim)
        # Eigenvectors of the small product instead of an SVD of the long matrix: the same space.
        _, vectors = torch.linalg.eigh((plain.T @ plain).double())
        basis = vectors[:, -rank:].float()
        right = basis.unflatten(0, (heads, dim)).transpose(1, 2)
        return cls(
            to_array((plain @ basis).to(keys.dtype)),
            to_array(right.contiguous().to(keys.dtype)),
            cos.contiguous().numpy(),
            sin.contiguous().numpy(),
        )

    def keys(self) -> torch.Tensor:
        """All keys rebuilt, float32 [H, n, d]."""
        left, right = to_tensor(self.left).float(), to_tensor(self.right).float()
        return rotate(left @ right, to_tensor(self.cos), to_tensor(self.sin))

    @property
    def nbytes(self) -> int:
        """Bytes of the factors and the tables."""
        return sum(part.nbytes for part in (self.left, self.right, self.cos, self.sin))
