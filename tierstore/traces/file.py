"""The container of every trace: named arrays of numbers and a header in one .npz file."""

from __future__ import annotations

import errno
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import TraceError
from tierstore.whole_file import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.lib.npyio import NpzFile

Arrays = dict[str, npt.NDArray[Any]]

VERSION = 1
_HEADER = "header"
_FORMAT = "tierstore-trace"


def write_trace(
    path: str | Path, kind: str, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write a trace; the file appears whole or not at all.

    facts: what JSON can hold, TraceError otherwise. OSError of the file system passes through.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TraceError(f"array {name!r}: expected numbers, found Python objects")
    header = {"format": _FORMAT, "version": VERSION, "kind": kind, "facts": dict(facts)}
    try:
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"facts: expected what JSON can hold, found {error}") from error
    # Any: numpy's stubs take every name for its option allow_pickle.
    entries: dict[str, Any] = {_HEADER: text, **arrays}
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **entries)


def kind_of(path: str | Path) -> str | None:
    """The kind of trace that a file says it is; None for a file of others."""
    try:
        with _opened(Path(path)) as archive:
            kind = _header(archive, path).get("kind")
    except TraceError:
        return None
    return kind if isinstance(kind, str) else None


def read_trace(path: str | Path, kind: str) -> tuple[dict[str, Any], Arrays]:
    """Facts and arrays of a trace of that kind. TraceError if the file is not one.

    Half of a pair of UTF-16 in a fact, which no output takes, is read as a question mark.
    """
    with _opened(Path(path)) as archive:
        header = _header(archive, path)
        arrays = {name: _array(archive, name) for name in archive.files if name != _HEADER}
    # By type, too: 1.0 and True are equal to 1.
    if type(header.get("version")) is not int or header["version"] != VERSION:
        raise TraceError(
            f"{path}: expected trace version {VERSION}, found {header.get('version')!r}: "
            "a newer tierstore wrote it"
        )
    if header.get("kind") != kind:
        raise TraceError(f"{path}: expected a trace of {kind}, found one of {header.get('kind')}")
    facts = header.get("facts")
    if not isinstance(facts, dict):
        raise TraceError(f"{path}: expected facts by name, found {facts!r}")
    return facts, arrays


@contextmanager
def _opened(path: Path) -> Iterator[NpzFile]:
    """The archive in a file; TraceError for whatever its content makes numpy and others raise.

    OSError of the file system passes through.
    """
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                yield archive
        except TraceError:
            raise
        # Any other: zipfile, its decompressors, numpy and json have no common one for damage.
        except Exception as error:
            # Damage too: a place that no file has, and bz2's, which has no number.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise TraceError(
                f"{path}: expected a trace written by tierstore, "
                f"found {str(error) or type(error).__name__}"
            ) from error


def _array(archive: NpzFile, name: str) -> npt.NDArray[Any]:
    array: object = archive[name]
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name!r}, which is no array of numpy")
    return array


def _header(archive: NpzFile, path: str | Path) -> dict[str, Any]:
    given = json.loads(_array(archive, _HEADER).tobytes())
    header = json.loads(json.dumps(given, ensure_ascii=False).encode(errors="replace"))
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise TraceError(f"{path}: expected a trace written by tierstore, found another .npz file")
    return header
