"""Compiled functions as plain Python: to count what they do, and to change a part of one."""

from __future__ import annotations

import sys
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def in_python(
    function: Callable[..., Any], parts: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """A compiled function that runs as plain Python, and all compiled functions that it calls.

    parts: what some of their global names should mean instead, functions or numbers.
    """
    made: dict[FunctionType, FunctionType] = {}

    def in_python_too(value: object) -> object:
        source = _source_of(value)
        if source is None:
            return value
        if source not in made:
            names = dict(source.__globals__)
            made[source] = FunctionType(source.__code__, names, source.__name__)
            for name in set(source.__code__.co_names) & (set(names) | set(parts or {})):
                names[name] = in_python_too((parts or {}).get(name, names.get(name)))
        return made[source]

    plain = in_python_too(function)
    assert isinstance(plain, FunctionType)
    return plain


def _source_of(value: object) -> FunctionType | None:
    """The Python function behind a compiled one; where Numba is missing, behind its stand-in."""
    source = getattr(value, "py_func", getattr(value, "__wrapped__", value))
    return source if isinstance(source, FunctionType) else None


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python run in `call`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
