"""How code of this package takes part in `torch.compile`: not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def outside_graphs(function: _Function) -> _Function:
    """Let compiled code break its graph at `function` and call it as it is."""
    return cast("_Function", torch.compiler.disable(function))
