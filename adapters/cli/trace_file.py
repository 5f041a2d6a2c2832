"""Attention traces from files that users name, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.policies.run_facts import check_facts, check_scores
from tierstore.traces.attention import AttentionTrace

if TYPE_CHECKING:
    from collections.abc import Collection


def read_attention(
    path: str | Path, *, needed: Collection[str] = (), steps: int = 0
) -> AttentionTrace:
    """The trace in a file, with facts of the kinds that are expected.

    ConfigError if the file cannot be read; TraceError if it is none, lacks a fact that is `needed`,
    or, where `steps` are asked for, has fewer or no scores.
    """
    try:
        trace = AttentionTrace.load(Path(path))
    except OSError as error:
        raise ConfigError(
            f"trace={str(path)!r}: {error.strerror}; pass a file that tierstore trace record wrote"
        ) from error
    check_facts(trace, str(path), needed)
    if steps:
        check_scores(trace, str(path), steps)
    return trace
