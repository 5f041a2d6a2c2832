"""What callers hand over: checked, and brought into one form."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Bytes

    Keys = Sequence[bytes] | Bytes
    Values = Sequence[bytes | bytearray | memoryview | Bytes] | Bytes

MOST_WHOLE = 2**63 - 1
"""The largest number that an int64 holds."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether that is a whole number, of Python or numpy; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether that is a real number which a float holds: neither NaN nor infinite, and no bool."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    return bool(-sys.float_info.max <= value <= sys.float_info.max)


def check_whole(name: str, value: int, least: int, most: int = MOST_WHOLE) -> int:
    """`value` itself; ConfigError if it is not a whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}: expected a whole number from {least} to {most}")
    return int(value)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ConfigError unless that is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def views(values: Values) -> list[memoryview]:
    """Each value as bytes, without a copy."""
    try:
        views = [
            (value.data if isinstance(value, np.ndarray) else memoryview(value)).cast("B")
            for value in values
        ]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"values: expected contiguous bytes-like objects ({error}); pass arrays through "
            "np.ascontiguousarray"
        ) from error
    if any(isinstance(value, np.ndarray) and value.dtype.hasobject for value in values):
        raise ConfigError("values: expected contiguous bytes-like objects, found arrays of objects")
    return views


def check_deadline(deadline: float | None) -> None:
    """ConfigError unless that is a number of seconds from now, or None."""
    if deadline is None:
        return
    if not (isinstance(deadline, int | float) and 0 <= deadline <= threading.TIMEOUT_MAX):
        raise ConfigError(
            f"deadline={deadline!r}: expected seconds from now, 0 or more, or None to wait"
        )


def check_out(out: Bytes, count: int) -> None:
    """ConfigError unless that is writable uint8 [count, m]."""
    if not isinstance(out, np.ndarray):
        raise ConfigError(f"out is a {type(out).__name__}: expected a NumPy array")
    if out.ndim != 2 or out.dtype != np.uint8 or len(out) != count or not out.flags.writeable:
        kind = "" if out.flags.writeable else "read-only "
        raise ConfigError(
            f"out is {kind}{out.dtype} {out.shape}: expected writable uint8 [{count}, bytes of a "
            "value]"
        )


def too_narrow(out: Bytes, nbytes: int) -> str:
    """What to say where a value does not fit into a row."""
    return (
        f"out has rows of {out.shape[1]} bytes: expected at least {nbytes}, the longest of these "
        "values"
    )


def key_list(keys: Keys) -> list[bytes]:
    """Keys one by one, as bytes."""
    return [bytes(key) for key in keys]
