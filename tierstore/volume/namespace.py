"""The directory of one volume: the names in it, and the file ``IDENTITY`` that says whose it is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, StoreMismatchError, TierOfflineError
from tierstore.identity import Facts
from tierstore.io import read_fully, write_fully
from tierstore.volume.lock import LOCK
from tierstore.volume.manifest import FOLDER
from tierstore.volume.segment import SUFFIX

if TYPE_CHECKING:
    from tierstore.io import FileIO

IDENTITY = "IDENTITY"
UNFINISHED = "IDENTITY.new"
SEGMENTS = "segments"
SEGMENT_NAME = re.compile(r"(\d{8})" + re.escape(SUFFIX))
_IDENTITY_BYTES_MOST = 1 << 16


def make_namespace(
    io: FileIO, parent: str | os.PathLike[str], folder: str, *, read_only: bool
) -> str:
    """The absolute path of a namespace's directory, made (0700) if it may be."""
    root = Path(absolute(parent))
    try:
        if not read_only and not os.path.lexists(root):
            io.make_directory(str(root))
            io.sync_directory(str(root.parent))
        directory = root / folder
        if not read_only and not os.path.lexists(directory):
            io.make_directory(str(directory))
            io.sync_directory(str(root))
        if directory.is_symlink() or not directory.is_dir():
            raise ConfigError(
                f"{str(directory)!r}: expected a directory of a store, found "
                f"{'nothing' if not os.path.lexists(directory) else 'something else'}"
            )
        io.list(str(directory))
        _check_names(str(directory))
    except OSError as error:
        raise ConfigError(
            f"path={str(parent)!r} cannot hold a store ({error.strerror}): choose a directory that "
            "can be written, whose parent exists"
        ) from error
    return str(directory)


def absolute(path: str | os.PathLike[str]) -> str:
    """Where a path leads now, whatever the working directory will be. ConfigError for no path."""
    try:
        found = os.path.abspath(path)
    except TypeError as error:
        raise ConfigError(f"path={path!r}: expected the path of a directory") from error
    if not isinstance(found, str) or "\0" in found:
        raise ConfigError(f"path={path!r}: expected the path of a directory")
    return found


def _check_names(directory: str) -> None:
    """StoreMismatchError if a name of ours stands for something else, a link above all."""
    for name, is_right in (
        (IDENTITY, os.path.isfile),
        (LOCK, os.path.isfile),
        (SEGMENTS, os.path.isdir),
        (FOLDER, os.path.isdir),
    ):
        path = os.path.join(directory, name)
        if os.path.lexists(path) and (os.path.islink(path) or not is_right(path)):
            raise StoreMismatchError(
                f"{path!r} is not what a store keeps under that name: move it away, or choose "
                "another directory"
            )


def read_facts(io: FileIO, path: str) -> Facts | None:
    """What a file ``IDENTITY`` says; None if it is damaged or missing."""
    try:
        fd = io.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = io.size(fd)
        if size > _IDENTITY_BYTES_MOST:
            return None
        text = bytearray(size)
        read_fully(io, fd, text, 0)
    except TierOfflineError:
        return None
    finally:
        io.close(fd)
    return Facts.decode(bytes(text), repr(path))


def write_facts(io: FileIO, directory: str, facts: Facts) -> None:
    """Replace the file ``IDENTITY``, durably; OSError, and no change."""
    path, fresh = os.path.join(directory, IDENTITY), os.path.join(directory, UNFINISHED)
    fd = io.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(io, fd, [facts.encode()], 0)
        io.sync(fd)
    finally:
        io.close(fd)
    io.reached("facts.before_rename")
    io.rename(fresh, path)
    io.sync_directory(directory)
