"""Numba's `njit` where Numba is installed; elsewhere functions run as plain Python: slow, right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

try:
    from numba import njit as _njit
except ImportError:

    def njit(function: Function) -> Function:
        """Unsigned arithmetic wraps around, as it does when compiled."""
        return np.errstate(over="ignore")(function)

    counting_free = part = njit

else:
    _ALLOCATES_NOTHING: dict[str, Any] = {"nogil": True, "_nrt": False}

    def njit(function: Function) -> Function:
        """Compiled on first use, cached on disk, and running without the GIL."""
        return cast("Function", _njit(cache=True, nogil=True)(function))

    def counting_free(function: Function) -> Function:
        """As `njit`, for functions that allocate nothing: they do not count references to arrays.

        Counting takes ten times as long as a small function that is given a tuple of arrays.
        """
        return cast("Function", _njit(cache=True, **_ALLOCATES_NOTHING)(function))

    def part(function: Function) -> Function:
        """As `counting_free`, and kept on disk only as a part of what calls it."""
        return cast("Function", _njit(**_ALLOCATES_NOTHING)(function))
