"""SnapKV's ranking: what the last tokens of the prompt attended to, once and for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import to_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.interfaces import Scores
    from tierstore.kernels.element import Array

POOLS: dict[str, Callable[..., torch.Tensor]] = {
    "avg": functional.avg_pool1d,
    "max": functional.max_pool1d,
}


class SnapKVIndex(ScoringIndex):
    """Blocks of the prompt ranked by the attention of its last queries; later ones always selected.

    The score of a block is the sum over its tokens of `window_scores`. It is fixed at the build,
    and costs nothing in a step. Of several calls with `last_queries`, each ranks its own tokens.
    Tokens without them, as generated ones are, the system leaves all attended: their blocks are
    kept beside the budget. A row that is built without them is ranked by recency.

    Parameters
    ----------
    pool, kernel: how scores are smoothed along the tokens: ``"avg"`` or ``"max"`` over an odd
        number of neighbours (LongBench runs: max over 7); 1 for not at all.
    """

    rule = Rule("mean_group")
    keeps_blocks = True

    def __init__(
        self,
        shape: IndexShape,
        *,
        pool: str = "avg",
        kernel: int = 5,
        page_tokens: int | None = None,
        rule: Rule | None = None,
    ) -> None:
        _check_pool(pool, kernel)
        super().__init__(shape, page_tokens=page_tokens, rule=rule)
        self.pool = pool
        self.kernel = kernel

    def columns(self) -> dict[str, Column]:
        return {"importance": Column("unit", (), np.float32, on_host=True)}

    def represent(self, new: NewTokens) -> Representatives:
        last = new.context.last_queries
        rows, n, _ = new.keys.shape
        if last is not None:
            scale = self.shape.scale
            scores = window_scores(last, new.keys, scale, pool=self.pool, kernel=self.kernel)
        else:
            ramp = torch.arange(1, n + 1, dtype=torch.float32)
            scores = (ramp / ramp.sum()).expand(rows, self.shape.group, n)
        is_late = new.first_unit > 0 and last is None
        kept = torch.full((rows, n // self.shape.block_tokens), is_late)
        return Representatives({"importance": self._importance(scores)}, kept=kept)

    def _importance(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of pages [R, u] from those of tokens in each head, [R, G, n]."""
        masses = scores.unflatten(2, (-1, self.page_tokens)).sum(3)
        logits = masses.clamp(min=torch.finfo(torch.float32).tiny).log().cpu().contiguous()
        rows, _, units = logits.shape
        out = torch.empty(rows, units)
        kernels.combine_heads(
            to_array(logits), np.full(rows, units, np.int32), None, 1.0, None, self.rule.aggregate,
            self.rule.softmax, self.shape.heads, to_array(out),
        )  # fmt: skip
        return out

    def _unit_scores(self, query: Array, beside: Array | None) -> Scores:
        return self.data["importance"]


def window_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    *,
    pool: str = "avg",
    kernel: int = 5,
) -> torch.Tensor:
    """How much attention a window of queries pays to each key: float32 [R, G, n].

    It is the sum over the window of its attention over exactly these keys, smoothed along them. The
    window's own keys are not among them, so no mask is needed. To place blocks, sum it over their
    tokens.

    Parameters
    ----------
    queries: [R, G, w, d]. keys: [R, n, d]. scale: factor of the logits.
    pool, kernel: ``"avg"`` or ``"max"`` over an odd number of keys, with places beyond the ends
        counted as 0 by the average; 1 leaves the scores as they are.
    """
    _check_pool(pool, kernel)
    # Row by row, since the logits of all rows' windows would be large.
    summed = [
        (q.float() @ k.float().T * scale).softmax(-1).sum(-2)
        for q, k in zip(queries, keys, strict=True)
    ]
    smoothed: torch.Tensor = POOLS[pool](torch.stack(summed), kernel, stride=1, padding=kernel // 2)
    return smoothed


def _check_pool(pool: str, kernel: int) -> None:
    if pool not in POOLS:
        raise ConfigError(f"pool={pool!r}: expected 'avg' or 'max'")
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}: expected an odd number of tokens, 1 for no smoothing")
