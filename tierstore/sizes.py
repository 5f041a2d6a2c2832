"""Byte sizes, budgets and other amounts as people write them."""

import math
import re
from fractions import Fraction

from tierstore.arguments import MOST_WHOLE, is_whole
from tierstore.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MOST = 2**31 - 1
"""Largest number of tokens, steps and other things counted: blocks have 32-bit numbers."""

_MOST_BUDGETS = 1e9
_SHARE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str, what: str = "size") -> int:
    """Bytes of ``"16MiB"``, ``"1.5 GB"`` or a number; `what` names the argument in errors."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{what}={size!r}: expected a number and a unit, such as 512KiB, 16MiB, 1.5GB"
            )
        # A float takes any number of digits; what is too much, even infinite, is cut.
        value = int(min(float(match[1]) * _UNITS[match[2].lower()], 2.0 * MOST_WHOLE))
    elif is_whole(size):
        value = int(size)
    else:
        raise ConfigError(f"{what}={size!r}: expected bytes as an int or a string such as '16MiB'")
    if value <= 0:
        raise ConfigError(f"{what}={size!r}: expected more than zero bytes, for example '16MiB'")
    if value > MOST_WHOLE:
        raise ConfigError(f"{what}={size!r:.40}: expected less than 8 EiB, for example '16MiB'")
    return value


def parse_size_of(size: str, whole: int, what: str) -> int:
    """`parse_size`, and ``"12.5%"`` for a share in (0, 1] of `whole` bytes, rounded up."""
    if not size.strip().endswith("%"):
        return parse_size(size, what)
    match = _SHARE.fullmatch(size)
    share = Fraction(match[1]) / 100 if match else 0
    if not 0 < share <= 1:
        raise ConfigError(
            f"{what}={size!r}: expected a share above 0% and up to 100%, or a size such as 16MiB"
        )
    return parse_size(math.ceil(share * whole), what)


def format_size(size: float) -> str:
    """`size` bytes for people: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_budget(budget: float | str) -> float | int:
    """A share of the context as a float in (0, 1], or tokens as an int from 1 to `MOST`.

    ``"6.25%"`` and ``0.0625`` are shares, ``2048`` and ``"2048"`` are tokens.
    """
    value: float | int | str = budget
    try:
        if isinstance(value, str):
            text = value.strip()
            if text.endswith("%"):
                value = float(text[:-1]) / 100
            else:
                value = int(text) if text.isdecimal() else float(text)
        if is_whole(value) and 1 <= value <= MOST:
            return int(value)
        if isinstance(value, float) and 0 < value <= 1:
            return value
    except ValueError:
        pass
    raise ConfigError(
        f"budget={budget!r}: expected a share of the context in (0, 1] or a whole number of tokens "
        f">= 1 and <= {MOST}, for example 0.0625, '6.25%' or 2048"
    )


def check_window(window: float) -> None:
    """ConfigError unless a fast tier can hold so many budgets."""
    is_number = isinstance(window, int | float) and not isinstance(window, bool)
    if not is_number or not 1 <= window <= _MOST_BUDGETS:
        raise ConfigError(
            f"window={window!r}: expected at least 1 budget and at most {_MOST_BUDGETS:.0e}, for "
            "example 2"
        )
