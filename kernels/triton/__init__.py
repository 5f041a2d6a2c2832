"""Triton kernels over tensors on a GPU, or, under ``TRITON_INTERPRET=1``, over NumPy arrays.

They are specified by `tierstore.kernels.reference`, `tierstore.kernels.tables` and
`tierstore.kernels.quantise`. Importing this needs Triton.
"""

from tierstore.kernels.triton.attend import attend_blocks, merge_parts
from tierstore.kernels.triton.clustering import cluster_sums, nearest_centroids
from tierstore.kernels.triton.combine import combine_heads, pool_pages
from tierstore.kernels.triton.directory import judge
from tierstore.kernels.triton.gather import gather_blocks
from tierstore.kernels.triton.logits import box_logits, dot_logits
from tierstore.kernels.triton.pq import pack_codes, pq_logits
from tierstore.kernels.triton.represent import page_bounds, page_means
from tierstore.kernels.triton.select import select_blocks

__all__ = [
    "attend_blocks",
    "box_logits",
    "cluster_sums",
    "combine_heads",
    "dot_logits",
    "gather_blocks",
    "judge",
    "merge_parts",
    "nearest_centroids",
    "pack_codes",
    "page_bounds",
    "page_means",
    "pool_pages",
    "pq_logits",
    "select_blocks",
]
