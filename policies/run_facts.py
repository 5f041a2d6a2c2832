"""Checks of what an attention trace says of its run, for those who make something of it."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.errors import ConfigError, TraceError
from tierstore.sizes import MOST, parse_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tierstore.traces.attention import AttentionTrace

MODEL = ("layers", "kv_heads", "query_heads", "head_dim")
"""Facts that tell one kind of model from another."""


class _Kind(NamedTuple):
    """What a fact is: in words, and whether a value is one."""

    words: str
    includes: Callable[[object], bool]


def check_facts(trace: AttentionTrace, source: str, needed: Collection[str] = ()) -> None:
    """TraceError unless the facts are of the kinds that ``tierstore trace record`` writes.

    Those that are `needed` must be there, and the two that `AttentionTrace` promises. Facts of
    other names may be whatever JSON can hold. source: names the trace in errors.
    """
    for name, kind in (_KINDS | {"selectable": _shares(trace.segments)}).items():
        value = trace.facts.get(name)
        if value is None and name in needed:
            raise TraceError(
                f"{source}: fact {name}: expected {kind.words}, found none; record it again with "
                "tierstore trace record"
            )
        if not kind.includes(value) and (value is not None or name in _PROMISED):
            raise TraceError(
                f"{source}: fact {name}: expected {kind.words}, found {reprlib.repr(value)}"
            )
    try:
        json.dumps(dict(trace.facts), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"{source}: facts: expected what JSON can hold ({error})") from error


def check_scores(trace: AttentionTrace, source: str, steps: int = 1) -> None:
    """TraceError unless there are as many `steps`, and blocks with scores to choose from."""
    if trace.steps < steps:
        raise TraceError(f"{source}: expected at least {steps} steps, found {trace.steps}")
    is_block = np.arange(trace.unit_of.shape[1]) < trace.blocks[-1][:, None]
    if not (is_block & (trace.unit_of >= 0)).any():
        raise TraceError(f"{source}: expected blocks with scores, found none")


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_budget(value: object) -> bool:
    try:
        parse_budget(value)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


def _shares(segments: int) -> _Kind:
    def includes(value: object) -> bool:
        if not isinstance(value, list | tuple) or len(value) != segments:
            return False
        # Sums of rounded weights may come to a little more than all.
        return all(type(share) in (int, float) and 0 <= share <= 1.001 for share in value)

    return _Kind(f"a share of attention for each of {segments} segments", includes)


_COUNT = _Kind(f"a whole number from 1 to {MOST}", _is_count)
_TEXT = _Kind("text", _is_text)
_PROMISED = ("block_tokens", "context_tokens")
_KINDS = {
    **dict.fromkeys((*MODEL, "value_size", *_PROMISED), _COUNT),
    **dict.fromkeys(("model", "dtype", "document", "preset"), _TEXT),
    "budget": _Kind("a share of the context, or a number of tokens", _is_budget),
}
