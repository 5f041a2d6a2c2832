"""The container of every trace: named arrays and a header in one .npz file, without pickle."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Arrays = dict[str, npt.NDArray[Any]]

VERSION = 1
_HEADER = "header"
_FORMAT = "tierstore-trace"
_DAMAGED = (
    ValueError, KeyError, EOFError, TypeError, AttributeError, NotImplementedError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What numpy and zipfile raise over bytes that are no archive of arrays."""


def write_trace(
    path: Path, kind: str, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write a trace; the file appears whole or not at all.

    facts: what JSON can hold. OSError of the file system passes through.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TraceError(f"array {name!r}: expected numbers, found Python objects")
    header = {"format": _FORMAT, "version": VERSION, "kind": kind, "facts": dict(facts)}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    # Any: numpy's stubs take every name for its option allow_pickle.
    entries: dict[str, Any] = {_HEADER: text, **arrays}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **entries)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_trace(path: Path, kind: str) -> tuple[dict[str, Any], Arrays]:
    """Facts and arrays of a trace of that kind. TraceError if the file is not one."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive[_HEADER].tobytes())
            arrays = {name: archive[name] for name in archive.files if name != _HEADER}
    except _DAMAGED as error:
        raise TraceError(f"{path}: expected a trace written by tierstore, found {error}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise TraceError(f"{path}: expected a trace written by tierstore, found another .npz file")
    if header.get("version") != VERSION:
        raise TraceError(
            f"{path}: expected trace version {VERSION}, found {header.get('version')!r}: "
            "a newer tierstore wrote it"
        )
    if header.get("kind") != kind:
        raise TraceError(f"{path}: expected a trace of {kind}, found one of {header.get('kind')}")
    return header["facts"], arrays
