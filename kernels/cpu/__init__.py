"""Numba kernels over NumPy arrays: they release the GIL and are cached on disk."""

from tierstore.kernels.cpu.attend import attend_kernel
from tierstore.kernels.cpu.boxes import box_kernel
from tierstore.kernels.cpu.clustering import nearest, sums_kernel
from tierstore.kernels.cpu.combine import (
    NO_FLAGS,
    NO_SIZES,
    NO_UNITS,
    combine_kernel,
    pool_kernel,
    rank_heads,
)
from tierstore.kernels.cpu.estimate import (
    cluster_kernel,
    collision_kernel,
    pack_signs,
    sampled_kernel,
)
from tierstore.kernels.cpu.graph import search_kernel, walk_kernel
from tierstore.kernels.cpu.logits import dot_kernel, weigh_kernel
from tierstore.kernels.cpu.low_rank import low_rank_kernel
from tierstore.kernels.cpu.pq import lookup_kernel, pack_kernel
from tierstore.kernels.cpu.select import select

__all__ = [
    "NO_FLAGS",
    "NO_SIZES",
    "NO_UNITS",
    "attend_kernel",
    "box_kernel",
    "cluster_kernel",
    "collision_kernel",
    "combine_kernel",
    "dot_kernel",
    "lookup_kernel",
    "low_rank_kernel",
    "nearest",
    "pack_kernel",
    "pack_signs",
    "pool_kernel",
    "rank_heads",
    "sampled_kernel",
    "search_kernel",
    "select",
    "sums_kernel",
    "walk_kernel",
    "weigh_kernel",
]
