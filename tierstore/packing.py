"""Named arrays as one run of bytes, for records; unlike pickles they can be read without trust."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

_KINDS = "biufU"
_KIND = re.compile(rf"[<>|][{_KINDS}][0-9]{{1,9}}")
"""A type as `dtype.str` says it. NumPy reads many other texts too, some of them as Python."""

_LENGTH = 8


def pack_arrays(arrays: Arrays) -> bytes:
    """Names, types, shapes and elements; ValueError for elements that are not plain values."""
    entries, pieces = [], []
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise ValueError(f"array {name!r} of {array.dtype}: expected numbers or text")
        entries.append((name, array.dtype.str, array.shape))
        pieces.append(array.tobytes())
    head = json.dumps(entries).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *pieces])


def unpack_arrays(data: bytes) -> dict[str, npt.NDArray[Any]] | None:
    """What `pack_arrays` packed, read-only arrays; None for any other bytes."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        for name, kind, shape in json.loads(data[_LENGTH:start]):
            if not isinstance(name, str) or not _KIND.fullmatch(kind) or min(shape, default=0) < 0:
                return None
            dtype, count = np.dtype(kind), math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += count * dtype.itemsize
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return arrays if start == len(data) else None
