"""Numeric inner loops: one signature per operation, a backend chosen by where the arrays live.

Arrays are NumPy (Numba runs them in place) or CuPy (Triton or plain torch runs them on the device).
Elements follow `tierstore.kernels.element`. Shapes use R rows, G query heads per row, d the head
dimension.

`tierstore.kernels.reference` is the specification; every backend is property-tested against it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.kernels.backend import backend_of
    from tierstore.kernels.coding import (
        cluster_sums,
        nearest_centroids,
        pack_codes,
        pq_logits,
    )
    from tierstore.kernels.estimate import (
        attend_clusters,
        attend_sampled,
        count_collisions,
        pack_signs,
        search_graph,
        walk_graph,
    )
    from tierstore.kernels.operations import (
        attend_blocks,
        attend_low_rank,
        box_logits,
        combine_heads,
        dot_logits,
        pool_pages,
        select_blocks,
        weigh_strips,
    )
    from tierstore.kernels.pages import page_bounds, page_means
    from tierstore.kernels.shape import BlockShape

__all__ = [
    "BlockShape",
    "attend_blocks",
    "attend_clusters",
    "attend_low_rank",
    "attend_sampled",
    "backend_of",
    "box_logits",
    "cluster_sums",
    "combine_heads",
    "count_collisions",
    "dot_logits",
    "nearest_centroids",
    "pack_codes",
    "pack_signs",
    "page_bounds",
    "page_means",
    "pool_pages",
    "pq_logits",
    "search_graph",
    "select_blocks",
    "walk_graph",
    "weigh_strips",
]

_HOMES = {
    "BlockShape": "shape",
    "attend_clusters": "estimate",
    "backend_of": "backend",
    "attend_sampled": "estimate",
    "cluster_sums": "coding",
    "count_collisions": "estimate",
    "nearest_centroids": "coding",
    "pack_codes": "coding",
    "pack_signs": "estimate",
    "page_bounds": "pages",
    "page_means": "pages",
    "pq_logits": "coding",
    "search_graph": "estimate",
    "walk_graph": "estimate",
}


def __getattr__(name: str) -> object:
    # torch takes seconds to import: kernels that need none must not wait for it.
    if name in __all__:
        home = _HOMES.get(name, "operations")
        return getattr(import_module(f"tierstore.kernels.{home}"), name)
    raise AttributeError(f"module 'tierstore.kernels' has no attribute {name!r}")
