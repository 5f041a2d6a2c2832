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

    @property
    def codes_each(self) -> int:
        """Codes that a token has."""
        return self.parts

    def columns(self) -> dict[str, Column]:
        width = self._coded_dims(self.shape) // self.parts + (self.metric == "inner")
        words = (self.codes_each, 1 << self.bits, width)
        columns = {
            "codes": Column("unit", (self.codes_each, self.bits), np.int64, together=64),
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
        weights = self.importance(keys, new.context) if is_build else None
        codes = self.encode(self.coded(keys, fitted), fitted, weights)
        return Representatives({"codes": codes.transpose(1, 2)}, rows=fitted if is_build else {})

    def fit(self, keys: torch.Tensor, context: IndexContext) -> Fitted:
        """Columns of rows that `coded` needs, from the keys of the build."""
        return {}

    def coded(self, keys: torch.Tensor, fitted: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The vectors [R', n, .] that keys [R', n, d] are coded as."""
        return keys

    def importance(self, keys: torch.Tensor, context: IndexContext) -> torch.Tensor | None:
        """What each of the keys counts in training, float32 [R', n] > 0; None for alike."""
        return None

    def encode(
        self, vectors: torch.Tensor, fitted: Fitted, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Codes [R', codes_each, n] of vectors [R', n, .].

        Where `fitted` has no codewords, they are trained on the weighted vectors and put there.
        """
        points = self._parts_of(vectors)
        if self.metric == "inner":
            squares = points.square().sum(-1)
            largest = fitted.setdefault("largest", squares.amax(2))
            rest = largest[..., None] - squares
            points = torch.cat([points, rest.clamp(min=0).sqrt()[..., None]], -1)
        codes, fitted["codewords"] = self._quantise(points, fitted.get("codewords"), weights)
        return codes

    def _parts_of(self, vectors: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = vectors.unflatten(2, (self.parts, -1)).transpose(1, 2)
        return parts

    def _quantise(
        self, points: torch.Tensor, words: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [R', p, n] of the nearest codewords of points [R', p, n, w], and the codewords.

        These are `words` [R', p, 2**bits, w], or trained on the weighted points.
        """
        sets = points.flatten(0, 1)
        if words is None:
            if weights is not None:
                weights = weights.repeat_interleave(points.shape[1], 0)
            words = self._train(sets, weights).unflatten(0, points.shape[:2])
        known = words.float().flatten(0, 1)
        codes = nearest(sets, known, known.square().sum(-1) / -2)
        return codes.view(points.shape[:3]), words

    def _fitted(self, rows: slice) -> Fitted:
        names = [name for name, column in self.columns().items() if column.per == "row"]
        return {name: to_tensor(self.data[name][rows]) for name in names}

    def _train(self, points: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Codewords [R', 2**bits, w] as they will be stored; the first one fills what is over."""
        step = -(-points.shape[1] // (self.training_tokens or points.shape[1]))
        points = points[:, ::step]
        weights = None if weights is None else weights[:, ::step]
        clusters = min(1 << self.bits, points.shape[1])
        _, words = kmeans(
            points, clusters, iterations=self.iterations, metric="l2", centre=False, weights=weights
        )
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
