"""Product quantisation of what queries see of keys: it keeps logits right rather than keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.pq import Fitted, PQIndex
from tierstore.indexers.snapkv import window_scores
from tierstore.kernels.clustering import in_range
from tierstore.kernels.element import stored_dtype, to_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from tierstore.indexers.rules import Rule
    from tierstore.indexers.scoring import IndexShape
    from tierstore.interfaces import IndexContext
    from tierstore.kernels.element import Array

_SHRINKAGE = 0.3
"""Share of an even spread in the second moments of queries, which few of them tell."""

_LEAST = 0.1
"""What a key without attention counts like, in means of the attention to a key."""


class WeightedPQIndex(PQIndex):
    """PQ of keys in the coordinates that the last queries of the prompt make the most of.

    With S the second moments of these queries, an error e of a key moves logits by ``e S e`` in the
    mean square. Keys are therefore turned by the square root of S, where this is plain distance,
    and queries by its inverse, so that their products stay. The principal axes of the turned keys
    are dealt to the parts so that each gets strong and weak ones; the weakest are left out. As many
    axes as a part has, those that its codewords leave the largest errors in, are refined: their
    errors are coded as one part more. In training a key counts by the square root of the attention
    that it got from these queries. Logits are relative to that of the row's mean key. Without
    queries, axes are those of the keys, and all of them count alike.

    Parameters
    ----------
    dims: axes that are kept; 32, or all if there are fewer.
    parts: codes of a token but for the refining one; a divisor of `dims`.
    bits, iterations, training_tokens, rule: as for `PQIndex`.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        dims: int | None = None,
        parts: int = 8,
        bits: int = 6,
        iterations: int = 4,
        training_tokens: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.dims = min(32, shape.dim) if dims is None else dims
        if not 1 <= self.dims <= shape.dim:
            raise ConfigError(f"dims={dims}: expected 1 to the head dimension, {shape.dim}")
        super().__init__(
            shape, parts=parts, bits=bits, iterations=iterations, training_tokens=training_tokens,
            rule=rule,
        )  # fmt: skip

    def _coded_dims(self, shape: IndexShape) -> int:
        return self.dims

    @property
    def codes_each(self) -> int:
        return self.parts + 1

    @property
    def _width(self) -> int:
        """Axes of a part."""
        return self.dims // self.parts

    def columns(self) -> dict[str, Column]:
        basis = Column("row", (self.dims, self.shape.dim), stored_dtype(self.shape.dtype))
        return {
            **super().columns(),
            "key_basis": basis,
            "query_basis": basis,
            "centre": Column("row", (self.dims,), np.float32),
            "refined": Column("row", (self._width,), np.int64),
        }

    def fit(self, keys: torch.Tensor, context: IndexContext) -> Fitted:
        root, inverse = self._roots(keys, context.last_queries)
        mean = keys.mean(1, keepdim=True)
        axes = self._axes(root @ _moments(keys - mean) @ root)
        fitted = {
            "key_basis": (axes @ root).to(self.shape.dtype),
            "query_basis": (axes @ inverse).to(self.shape.dtype),
        }
        fitted["centre"] = (mean @ fitted["key_basis"].float().transpose(1, 2)).squeeze(1)
        return fitted

    def _roots(
        self, keys: torch.Tensor, queries: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The square root [R', d, d] of the second moments of queries, and its inverse."""
        one = torch.eye(keys.shape[2], device=keys.device).expand(len(keys), -1, -1)
        if queries is None:
            return one, one
        seen = _moments(queries.float().flatten(1, 2))
        values, axes = torch.linalg.eigh((1 - _SHRINKAGE) * seen + _SHRINKAGE * one)
        roots = values.clamp(min=_SHRINKAGE / 2).sqrt()[:, None]
        turned = axes.transpose(1, 2)
        return (axes * roots) @ turned, (axes / roots) @ turned

    def _axes(self, moments: torch.Tensor) -> torch.Tensor:
        """The strongest axes [R', dims, d], dealt to the parts forth and back."""
        vectors = torch.linalg.eigh(moments).eigenvectors.flip(2)[..., : self.dims]
        hands = torch.arange(self.dims, device=moments.device).view(-1, self.parts)
        hands[1::2] = hands[1::2].flip(1)
        axes: torch.Tensor = vectors[..., hands.T.flatten()].transpose(1, 2)
        return axes

    def coded(self, keys: torch.Tensor, fitted: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return keys @ fitted["key_basis"].float().transpose(1, 2) - fitted["centre"][:, None]

    def importance(self, keys: torch.Tensor, context: IndexContext) -> torch.Tensor | None:
        if context.last_queries is None:
            return None
        masses = window_scores(context.last_queries, keys, self.shape.scale, kernel=1).sum(1)
        relative = masses / masses.mean(1, keepdim=True)
        return (relative.nan_to_num(0.0) + _LEAST).sqrt()

    def encode(
        self, vectors: torch.Tensor, fitted: Fitted, weights: torch.Tensor | None
    ) -> torch.Tensor:
        first = last = None
        if "codewords" in fitted:
            first, last = fitted["codewords"].split([self.parts, 1], 1)
        points = self._parts_of(vectors)
        codes, first = self._quantise(points, first, weights)
        chosen = codes[..., None].expand(-1, -1, -1, self._width)
        errors = points - first.float().gather(2, chosen)
        if "refined" not in fitted:
            fitted["refined"] = errors.square().sum(2).flatten(1).topk(self._width).indices
        part, axis = fitted["refined"] // self._width, fitted["refined"] % self._width
        rows = torch.arange(len(errors), device=errors.device)[:, None]
        worst = errors[rows, part, :, axis].transpose(1, 2)[:, None]
        more, last = self._quantise(worst, last, weights)
        if "codewords" not in fitted:
            fitted["codewords"] = torch.cat([first, last], 1)
        return torch.cat([codes, more], 1)

    def logits(self, query: Array, out: Array) -> None:
        asked = self._asked(query)
        kernels.pq_logits(asked, self.data["codewords"], self.data["codes"], self.units, 1.0, out)

    def _asked(self, query: Array) -> Array:
        """Scaled queries along all axes, then again along those that are refined."""
        rows, group, _ = query.shape
        take = self.shape.scratch.array
        turned = take("turned queries", (rows, group, self.dims), np.float32)
        again = to_tensor(take("refined axes", (rows, group, self._width), np.float32))
        asked = take("asked axes", (rows, group, self.dims + self._width), np.float32)
        all_dims = self._scratch.array("all dims", (rows,), np.int32)
        all_dims.fill(self.dims)
        kernels.dot_logits(query, self.data["query_basis"], all_dims, self.shape.scale, turned)
        along = to_tensor(turned)
        refined = to_tensor(self.data["refined"])[:, None].expand(-1, group, -1)
        torch.gather(along, 2, refined, out=again)
        torch.cat([along, again], 2, out=to_tensor(asked))
        return asked

    def _kind(self) -> npt.NDArray[np.str_]:
        return np.array(f"{super()._kind()}, {self._width} refined")


def _moments(vectors: torch.Tensor) -> torch.Tensor:
    """Second moments [R', d, d] of vectors [R', n, d], on average 1 in each direction, or 0."""
    vectors = in_range(vectors)
    moments = vectors.transpose(1, 2) @ vectors
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    return moments / mean.clamp(min=1e-30)[:, None, None]
