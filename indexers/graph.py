"""RetrievalAttention's index: a graph over keys that are near to the same queries."""

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
from tierstore.kernels.graph import adopt, link_back, project

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.interfaces import Ids, Selection
    from tierstore.kernels.element import Array

_LOGITS = 1 << 24
"""Inner products that are held at once when a graph is built."""
_BEAM = 2
"""Nodes kept in the walk for a new key's neighbours, for each of them."""


class GraphIndex(ScoringIndex):
    """Finds tokens by a walk over an attention-aware graph, and looks at few others.

    Built from the exact nearest keys of prefill's last queries (`IndexContext.last_queries`): the
    nearest key of a query is linked with its other near keys, and each key keeps its nearest edges
    that no other edge stands for. So that keys near to none of these queries can be found as well,
    keys, less their mean, are asked like queries. Every key also leads to the one that follows it,
    which connects the graph without an edge in memory. Tokens that come later are linked both ways
    with their own nearest keys; the system does not index them at all.

    Scores are those of tokens seen; `Selection.everything` is None. A budget of more blocks than
    were seen is filled with others, whose score is -inf. The index keeps the keys, since a store's
    blocks may be elsewhere: 2 x dim + 4 x degree bytes for each token at 16 bits.

    Parameters
    ----------
    degree: most edges of a key.
    neighbours: nearest keys of each query that the graph is built from (k).
    queries: most queries to build from, the last ones of a row; and most keys, evenly taken.
    beam: nodes kept in a search for each token wanted (ef / k), at least 1.
    is_exact: look at every key instead: the oracle.
    """

    rule = Rule("max", softmax=False)

    def __init__(
        self,
        shape: IndexShape,
        *,
        degree: int = 32,
        neighbours: int = 32,
        queries: int = 4096,
        beam: float = 2.0,
        is_exact: bool = False,
        rule: Rule | None = None,
    ) -> None:
        if degree < 1 or neighbours < 2 or queries < 1 or beam < 1:
            raise ConfigError(
                f"degree={degree}, neighbours={neighbours}, queries={queries}, beam={beam}: "
                "expected at least 1, 2, 1 and 1"
            )
        self.degree, self.neighbours, self.queries = degree, neighbours, queries
        self.beam, self.is_exact = beam, is_exact
        super().__init__(shape, page_tokens=1, rule=rule)
        self._beams: Ids = np.empty(0, np.int32)

    def columns(self) -> dict[str, Column]:
        return {
            "vectors": Column("unit", (self.shape.dim,), stored_dtype(self.shape.dtype)),
            "edges": Column("unit", (self.degree,), np.int32, on_host=True),
        }

    def represent(self, new: NewTokens) -> Representatives:
        if new.first_unit:
            return self._linked(new)
        keys = new.keys.to(self.shape.dtype).float()
        near, _ = _nearest(self._build_queries(new), keys, min(self.neighbours, keys.shape[1]))
        edges = np.full((*keys.shape[:2], self.degree), -1, np.int32)
        for own, lists, graph in zip(keys.cpu().numpy(), near.cpu().numpy(), edges, strict=True):
            project(own, lists, 0, graph)
        return Representatives({"vectors": new.keys, "edges": torch.from_numpy(edges)})

    def _linked(self, new: NewTokens) -> Representatives:
        """Link new keys both ways with the nearest that a walk finds, and the nearest of them.

        Only what is looked at is touched, so that it costs the same at any length.
        """
        have, count = new.first_unit, new.keys.shape[1]
        self.data.reserve(unit=have + count)
        vectors, edges = self.data["vectors"][new.rows], self.data["edges"][new.rows]
        to_tensor(vectors[:, have : have + count]).copy_(new.keys)
        near = self._near(vectors, edges, have, count)
        for own, lists, graph in zip(vectors, near, edges, strict=True):
            nodes = np.arange(have, have + count)
            touched = np.union1d(lists[lists >= 0], nodes).astype(np.int32)
            local = np.where(lists < 0, -1, np.searchsorted(touched, lists)).astype(np.int32)
            links = np.full((len(touched), self.degree), -1, np.int32)
            keys = to_tensor(own[touched]).float().cpu().numpy()
            adopt(keys, np.searchsorted(touched, nodes).astype(np.int32), local, links)
            # The new nodes are the last ones.
            links = links[-count:]
            graph[have : have + count] = np.where(links < 0, -1, touched[links])
            link_back(graph[: have + count], have)
        return Representatives(
            {"vectors": new.keys, "edges": torch.from_numpy(edges[:, have : have + count].copy())}
        )

    def _near(self, vectors: Array, edges: Array, have: int, count: int) -> Ids:
        """For each new key the nearest keys that there were, and of the new ones: int32 [R, q, k].

        -1 where there are no more.
        """
        asked = vectors[:, have : have + count]
        shape = (*asked.shape[:2], self.neighbours)
        array = self.shape.scratch.array
        found, logits = array("near", shape, np.int32), array("near logits", shape, np.float32)
        kernels.walk_graph(asked, vectors, edges, have, _BEAM * self.neighbours, found, logits)
        new = to_tensor(asked).float()
        others, values = _nearest(new, new, min(self.neighbours, count))
        ids = torch.cat([to_tensor(found), others + have], 2)
        best = torch.cat([to_tensor(logits), values], 2).topk(self.neighbours, dim=-1).indices
        near: Ids = ids.gather(2, best).cpu().numpy()
        return near

    def _build_queries(self, new: NewTokens) -> torch.Tensor:
        """Prefill's last queries, and keys in the place of queries that are yet to come."""
        keys = new.keys[:, :: -(-new.keys.shape[1] // self.queries)].float()
        asked = keys - new.keys.double().mean(1, keepdim=True).float()
        given = new.context.last_queries
        if given is None:
            return asked
        last = given.transpose(1, 2).flatten(1, 2)[:, -self.queries :].float()
        return torch.cat([last, asked], 1)

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        tokens = np.minimum(budgets, self.blocks) * self.shape.block_tokens
        self._beams = np.ceil(tokens * self.beam).astype(np.int32)
        selection = super().select(query, budgets, beside)
        selection.everything = None
        return selection

    def logits(self, query: Array, out: Array) -> None:
        if self.is_exact:
            super().logits(query, out)
            return
        kernels.search_graph(
            query, self.data["vectors"], self.data["edges"], self.units, self._beams,
            self.shape.scale, out,
        )  # fmt: skip

    def _kind(self) -> npt.NDArray[np.str_]:
        return np.array(f"{super()._kind()}, {self.degree} edges")


def _nearest(
    queries: torch.Tensor, keys: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k keys of largest inner product with each query, int32 [R, q, k], best first, and it."""
    step = max(1, _LOGITS // (len(keys) * keys.shape[1]))
    found = [(part @ keys.transpose(1, 2)).topk(k, dim=-1) for part in queries.split(step, dim=1)]
    ids = torch.cat([part.indices.int() for part in found], 1)
    return ids, torch.cat([part.values for part in found], 1)
