"""Numba kernels over NumPy arrays: they release the GIL and are cached on disk."""

from tierstore.kernels.cpu.attend import attend_kernel
from tierstore.kernels.cpu.score import score_kernel, select, weigh_kernel

__all__ = ["attend_kernel", "score_kernel", "select", "weigh_kernel"]
