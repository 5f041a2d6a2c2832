"""CUDA C++ for what Triton cannot say: reading host memory by address."""

from tierstore.kernels.cuda.gather import GatherFromHost, source

__all__ = ["GatherFromHost", "source"]
