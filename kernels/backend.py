"""Which kernels work on an array: decided by where it lives."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from tierstore.kernels import reference
from tierstore.kernels.element import Array, is_host

if TYPE_CHECKING:
    from types import ModuleType

try:
    from tierstore.kernels import cpu
except ImportError:  # Numba has no build for every Python; plain torch then serves the CPU too.
    cpu = None  # type: ignore[assignment]

__all__ = ["backend_of", "cpu", "elsewhere"]


def backend_of(array: Array) -> str:
    """The name of the backend that runs operations on `array`.

    ``numba`` for NumPy arrays and ``triton`` for those on a GPU; ``torch`` where Numba or Triton is
    missing.
    """
    if is_host(array):
        return "numba" if cpu is not None else "torch"
    return "torch" if _triton() is None else "triton"


@cache
def _triton() -> ModuleType | None:
    """The Triton kernels, which nothing imports before an array on a GPU turns up."""
    try:
        return import_module("tierstore.kernels.triton")
    except ImportError:
        return None


def elsewhere(array: Array) -> ModuleType | None:
    """The kernels that work on `array` as a tensor; None where Numba works on it as it is."""
    backend = backend_of(array)
    if backend == "numba":
        return None
    return reference if backend == "torch" else _triton()
