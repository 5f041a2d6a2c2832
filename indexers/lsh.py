"""MagicPIG's index: tokens that share buckets of a locality-sensitive hash with the query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError
from tierstore.indexers.columns import Column
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.kernels.element import Array

_PROJECTIONS = 1 << 24
"""Projections that are held at once when keys are hashed."""


class LSHIndex(ScoringIndex):
    """SimHash codes of centred keys; a token's score is the number of tables it meets a query in.

    MagicPIG retrieves, for each query head, what meets it in at least 2 tables, and estimates
    attention from that (`tierstore.kernels.attend_sampled`, fed by `collisions`). Under a budget,
    the blocks whose best token meets any head most often come first, and blocks that are not
    retrieved fill what is left. Queries are not centred. Tokens that come later are hashed as they
    come, less the same centre; MagicPIG keeps them on the GPU and never hashes them.

    A code has 2 bytes: 2 x `tables` bytes for each token and KV head, 300 by default, against 512
    of 16-bit keys and values of 128 channels. The published lists of sorted ids have twice as many,
    and find what is in a bucket without a look at all codes; here a scan counts collisions.

    Parameters
    ----------
    bits: of a code (MagicPIG's K), 1 to 15.
    tables: codes of a token (L), 2 to 32767.
    seed: of the hyperplanes, which all rows share.
    """

    rule = Rule("max", softmax=False)

    def __init__(
        self,
        shape: IndexShape,
        *,
        bits: int = 10,
        tables: int = 150,
        seed: int = 0,
        rule: Rule | None = None,
    ) -> None:
        if not 1 <= bits <= 15 or not 2 <= tables < 1 << 15:
            raise ConfigError(
                f"bits={bits}, tables={tables}: expected 1 to 15, and 2 to {(1 << 15) - 1}"
            )
        self.bits, self.tables, self.seed = bits, tables, seed
        super().__init__(shape, page_tokens=1, rule=rule)
        self._planes = shape.memory.take((shape.dim, bits * tables), np.dtype(np.float32), "index")
        random = torch.Generator().manual_seed(seed)
        to_tensor(self._planes).copy_(torch.randn(shape.dim, bits * tables, generator=random))

    def columns(self) -> dict[str, Column]:
        return {
            "codes": Column("unit", (self.tables,), np.int16),
            "centre": Column("row", (self.shape.dim,), np.float32),
        }

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._planes.nbytes

    def represent(self, new: NewTokens) -> Representatives:
        if new.first_unit == 0:
            centre = new.keys.double().mean(1).float()
        else:
            centre = to_tensor(self.data["centre"][new.rows])
        rows, _n, _ = new.keys.shape
        step = max(1, _PROJECTIONS // (rows * self.bits * self.tables))
        codes = [
            self._codes(part.float() - centre[:, None]) for part in new.keys.split(step, dim=1)
        ]
        return Representatives({"codes": torch.cat(codes, 1)}, rows={"centre": centre})

    def _codes(self, keys: torch.Tensor) -> torch.Tensor:
        """Codes [R, n, L] of centred keys [R, n, d], as elements of 16 bits."""
        bits = (keys @ to_tensor(self._planes) > 0).unflatten(-1, (self.tables, self.bits))
        powers = 2 ** torch.arange(self.bits, device=keys.device, dtype=torch.int16)
        codes: torch.Tensor = (bits * powers).sum(-1, dtype=torch.int16)
        return codes.view(torch.float16)

    def collisions(self, query: Array) -> Array:
        """float32 [R, G, tokens]: tables in which each token meets each query [R, G, d]."""
        places = (*query.shape[:2], self.data.places("unit"))
        out = self.shape.scratch.array("collisions", places, np.float32)
        self.logits(query, out)
        return out

    def logits(self, query: Array, out: Array) -> None:
        array = self.shape.scratch.array
        asked = array("asked", query.shape, np.float32)
        to_tensor(asked).copy_(to_tensor(query))
        codes = array("asked codes", (*query.shape[:2], self.tables), np.int16)
        projections = array("projections", (*query.shape[:2], self.bits * self.tables), np.float32)
        torch.matmul(to_tensor(asked), to_tensor(self._planes), out=to_tensor(projections))
        kernels.pack_signs(projections, self.bits, codes)
        kernels.count_collisions(codes, self.data["codes"], self.units, out)

    def centre(self) -> Array:
        """float32 [R, d], what is taken from the keys of each row before they are hashed."""
        return self.data["centre"]

    def _kind(self) -> npt.NDArray[np.str_]:
        return np.array(
            f"{super()._kind()}, {self.tables} codes of {self.bits} bits, seed {self.seed}"
        )
