"""PQCache's index: keys cut into parts, each replaced by the number of its nearest codeword."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.clustering import kmeans, nearest
from tierstore.kernels.element import stored_dtype, to_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from tierstore.indexers.rules import Rule
    from tierstore.interfaces import IndexContext
    from tierstore.kernels.element import Array

Fitted = dict[str, torch.Tensor]
"""Contents of columns of rows, made at the build and kept from then on."""

METRICS = "l2", "inner"
_LARGEST = 1e17
"""Elements of keys are cut off here, where sums of their squares are still finite."""


class PQIndex(ScoringIndex):
    """Scores every token by product quantisation, and a block by the mass of its tokens.

    Codewords are trained on the tokens that a row is built with, and stay; later tokens are encoded
    with them. A row built with fewer than ``2**bits`` tokens has only so many.

    Parameters
    ----------
    parts: sub-vectors of a key, a divisor of the head dimension (PQCache's M).
    bits: of a code, 1 to 8; a part has ``2**bits`` codewords.
    metric: codewords nearest to the part itself (``"l2"``), or to it with ``sqrt(f - |part|**2)``
        appended, f being the largest such square (``"inner"``: inner products become distances).
    iterations: rounds of k-means; PQCache does 3 to 300, what prefill leaves time for.
    training_tokens: most tokens to train on, evenly taken; None for all.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        parts: int = 2,
        bits: int = 6,
        metric: str = "l2",
        iterations: int = 10,
        training_tokens: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        if not 1 <= parts <= 256 or self._coded_dims(shape) % parts:
            raise ConfigError(
                f"parts={parts}: expected 1 to 256, and a divisor of the "
                f"{self._coded_dims(shape)} dimensions that are coded"
            )
        few = training_tokens is not None and training_tokens < 1
        if not 1 <= bits <= 8 or iterations < 1 or metric not in METRICS or few:
            raise ConfigError(
                f"bits={bits}, iterations={iterations}, metric={metric!r}, training_tokens="
                f"{training_tokens}: expected 1 to 8, at least 1, one of {', '.join(METRICS)}, "
                "and at least 1 or None"
            )
        self.parts, self.bits, self.metric = parts, bits, metric
        self.iterations, self.training_tokens = iterations, training_tokens
        super().__init__(shape, page_tokens=1, rule=rule)

    def _coded_dims(self, shape: IndexShape) -> int:
        """Length of the vectors that are cut into parts."""
        return shape.dim

    def columns(self) -> dict[str, Column]:
        width = self._coded_dims(self.shape) // self.parts + (self.metric == "inner")
        words = (self.parts, 1 << self.bits, width)
        columns = {
            "codes": Column("unit", (self.parts, self.bits), np.int64, together=64),
            "codewords": Column("row", words, stored_dtype(self.shape.dtype)),
        }
        if self.metric == "inner":
            columns["largest"] = Column("row", (self.parts,), np.float32)
        return columns

    def represent(self, new: NewTokens) -> Representatives:
        is_build = new.first_unit == 0
        keys = new.keys.float()
        if max(map(abs, torch.stack(torch.aminmax(keys)).tolist())) > _LARGEST:
            keys = keys.clamp(-_LARGEST, _LARGEST)
        fitted = self.fit(keys, new.context) if is_build else self._fitted(new.rows)
        vectors = self.coded(keys, fitted)
        rows, tokens, _ = vectors.shape
        points = vectors.unflatten(2, (self.parts, -1)).transpose(1, 2).flatten(0, 1)
        if self.metric == "inner":
            squares = points.square().sum(-1)
            if is_build:
                fitted["largest"] = squares.amax(1).view(rows, self.parts)
            rest = fitted["largest"].reshape(-1, 1) - squares
            points = torch.cat([points, rest.clamp(min=0).sqrt()[..., None]], -1)
        if is_build:
            fitted["codewords"] = self._train(points).unflatten(0, (rows, self.parts))
        words = fitted["codewords"].float().flatten(0, 1)
        codes = nearest(points, words, words.square().sum(-1) / -2)
        return Representatives(
            {"codes": codes.view(rows, self.parts, tokens).transpose(1, 2)},
            rows=fitted if is_build else {},
        )

    def fit(self, keys: torch.Tensor, context: IndexContext) -> Fitted:
        """Columns of rows that `coded` needs, from the keys of the build."""
        return {}

    def coded(self, keys: torch.Tensor, fitted: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The vectors [R', n, .] that keys [R', n, d] are coded as."""
        return keys

    def _fitted(self, rows: slice) -> Fitted:
        names = [name for name, column in self.columns().items() if column.per == "row"]
        return {name: to_tensor(self.data[name][rows]) for name in names}

    def _train(self, points: torch.Tensor) -> torch.Tensor:
        """Codewords [R', 2**bits, w] as they will be stored; the first one fills what is over."""
        step = -(-points.shape[1] // (self.training_tokens or points.shape[1]))
        points = points[:, ::step]
        clusters = min(1 << self.bits, points.shape[1])
        _, words = kmeans(points, clusters, iterations=self.iterations, metric="l2")
        spare = words[:, :1].expand(-1, (1 << self.bits) - clusters, -1)
        most = torch.finfo(self.shape.dtype).max
        return torch.cat([words, spare], 1).clamp(-most, most).to(self.shape.dtype)

    def _put(self, name: str, where: tuple[slice, ...], content: torch.Tensor) -> None:
        if name != "codes":
            super()._put(name, where, content)
            return
        codes = self.shape.scratch.array("new codes", tuple(content.shape), np.uint8)
        to_tensor(codes).copy_(content)
        kernels.pack_codes(codes, where[1].start, self.data["codes"][where[0]])

    def logits(self, query: Array, out: Array) -> None:
        kernels.pq_logits(
            query, self.data["codewords"], self.data["codes"], self.units, self.shape.scale, out
        )

    def _kind(self) -> npt.NDArray[np.str_]:
        coded = f"{self._coded_dims(self.shape)} in {self.parts} x {self.bits} bits"
        return np.array(f"{super()._kind()}, {coded} by {self.metric}")
