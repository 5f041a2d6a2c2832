"""InfiniGen's index: a few columns of keys that are turned so that few columns matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import stored_dtype, to_tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.kernels.element import Array


class PartialColumnsIndex(ScoringIndex):
    """Tokens scored by the heaviest columns of keys and queries turned by one orthogonal matrix.

    The matrix, one for each row, comes at the row's build from the singular vectors of the prompt's
    last queries (of its keys where those are absent), the columns are those in which turned
    queries and keys are largest together. A step selects what scores within 4 nats of the best (5
    for Llama-2: ``rule=``), by the mean count over a sequence's heads; its budget is the system's
    cap. InfiniGen asks it for a layer while the one before is computed: schedule
    ``"previous-layer"``.

    Parameters
    ----------
    ratio: share of the columns that is kept (the code: 0.2; the paper also 0.3).
    """

    rule = Rule("mean_group", softmax=False, threshold=4.0)

    def __init__(
        self,
        shape: IndexShape,
        *,
        ratio: float = 0.2,
        page_tokens: int = 1,
        rule: Rule | None = None,
    ) -> None:
        if not 0 < ratio <= 1:
            raise ConfigError(f"ratio={ratio}: expected a share of the columns, above 0 up to 1")
        self.kept_columns = max(1, int(ratio * shape.dim + 1e-9))
        super().__init__(shape, page_tokens=page_tokens, rule=rule)

    def columns(self) -> dict[str, Column]:
        kept, stored = (self.kept_columns,), stored_dtype(self.shape.dtype)
        return {
            "vectors": Column("unit", kept, stored),
            "turn": Column("row", (self.shape.dim, *kept), np.float32),
        }

    def represent(self, new: NewTokens) -> Representatives:
        keys = new.keys.float()
        if new.first_unit > 0:
            turned = keys @ to_tensor(self.data["turn"][new.rows])
            return Representatives({"vectors": self._pages(turned)})
        last = new.context.last_queries
        turn = skew(keys if last is None else last.flatten(1, 2).float())
        turned = keys @ turn
        weight = _column_weights(turned)
        if last is not None:
            weight += self.shape.group * _column_weights(last.flatten(1, 2).float() @ turn)
        chosen = weight.topk(self.kept_columns).indices[:, None]
        return Representatives(
            {"vectors": self._pages(turned.take_along_dim(chosen, 2))},
            rows={"turn": turn.take_along_dim(chosen, 2)},
        )

    def _pages(self, turned: torch.Tensor) -> torch.Tensor:
        # Turning may carry a key out of the range of its type.
        largest = torch.finfo(self.shape.dtype).max
        pages: torch.Tensor = turned.unflatten(1, (-1, self.page_tokens)).mean(2)
        return pages.clamp(-largest, largest)

    def _kind(self) -> npt.NDArray[np.str_]:
        return np.array(f"{super()._kind()} by {self.kept_columns} columns")

    def logits(self, query: Array, out: Array) -> None:
        array, kept = self.shape.scratch.array, self.kept_columns
        wide: Array = array("query", query.shape, np.float32)
        to_tensor(wide).copy_(to_tensor(query))
        turned: Array = array("turned query", (*query.shape[:2], kept), np.float32)
        torch.matmul(to_tensor(wide), to_tensor(self.data["turn"]), out=to_tensor(turned))
        kernels.dot_logits(turned, self.data["vectors"], self.units, self.shape.scale, out)


def skew(vectors: torch.Tensor) -> torch.Tensor:
    """Orthogonal matrices [R, d, d] whose columns are the right singular vectors of [R, n, d].

    Turning queries and keys by one of them leaves their dot products as they are and gathers most
    of the queries in few columns. The largest singular values come last.
    """
    peak = vectors.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = vectors.double() / peak
    vectors = torch.linalg.eigh(scaled.mT @ scaled)[1]
    return vectors.float()


def _column_weights(turned: torch.Tensor) -> torch.Tensor:
    return turned.abs().mean(1)
