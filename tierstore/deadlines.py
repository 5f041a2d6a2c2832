"""Deadlines: callers give seconds from now; what they call passes on the time when they are up."""

from __future__ import annotations

from time import monotonic


def end_of(deadline: float | None) -> float | None:
    """The time of `time.monotonic` at which so many seconds are up; None if they never are."""
    return None if deadline is None else monotonic() + deadline


def left_until(end: float | None) -> float | None:
    """Seconds until that time, 0 once it is past; None if it never comes."""
    return None if end is None else max(0.0, end - monotonic())
