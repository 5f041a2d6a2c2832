"""A storage engine that keeps the KV cache of long-context language models in tiers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.layout import BlockLayout, Part
    from tierstore.store import BlockStore
    from tierstore.visits import Visit

__all__ = ["BlockLayout", "BlockStore", "Part", "Visit", "__version__"]

__version__ = "0.1.0"

_HOME = {"BlockLayout": "layout", "Part": "layout", "BlockStore": "store", "Visit": "visits"}


def __getattr__(name: str) -> object:
    # torch and Numba take seconds to import: only what needs them should pay.
    if name in _HOME:
        return getattr(import_module(f"tierstore.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
