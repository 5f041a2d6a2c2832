"""What earlier epochs and unfinished operations left on disk, and how to be rid of it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.volume.lock import LOCK, DirectoryLock
from tierstore.volume.manifest import FILES, FOLDER, group_of
from tierstore.volume.namespace import IDENTITY, SEGMENT_NAME, SEGMENTS, UNFINISHED

if TYPE_CHECKING:
    from tierstore.io import FileIO
    from tierstore.volume.manifest import Manifest
    from tierstore.volume.segment import Segment
    from tierstore.volume.space import Space
    from tierstore.volume.volume import Volume

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was removed: segment files made empty, entries of the directory, unfinished files."""

    segments: int
    segment_bytes: int
    entries: int
    files: int


def discard_leftovers(volume: Volume, space: Space, manifest: Manifest, io: FileIO) -> Leftovers:
    """Wipe blank files that have old bytes, and forget their entries; `lock` must be held.

    Also removes ``IDENTITY.new``.
    """
    used = [segment for segment in space.blank if _has_rows(segment)]
    # Entries go first: a file without header that the directory knows is taken for damaged.
    entries = [key for key in manifest.all_keys() if _is_stale(key, volume)]
    manifest.remove(entries)
    for segment in used:
        volume.files.wipe(segment)
    unfinished = os.path.join(volume.directory, UNFINISHED)
    has_unfinished = os.path.lexists(unfinished)
    if has_unfinished:
        io.remove(unfinished)
    return Leftovers(
        len(used), sum(segment.nbytes for segment in used), len(entries), int(has_unfinished)
    )


def _has_rows(segment: Segment) -> bool:
    header = segment.read_header()
    return header is not None and header.extents > 0


def _is_stale(key: bytes, volume: Volume) -> bool:
    about = group_of(key)
    if about is None:
        return False
    segment = volume.files.by_number.get(about[0])
    return segment is None or segment.is_blank


def remove_namespace(directory: str) -> None:
    """Remove all that a namespace has on disk.

    StoreLockedError if it is open, ConfigError, naming them, if other files are in it; those are
    left.
    """
    lock = DirectoryLock(directory)
    try:
        # IDENTITY goes last: until then it is a store, with less and less in it.
        foreign = _remove(os.path.join(directory, SEGMENTS), SEGMENT_NAME.pattern)
        foreign += _remove(os.path.join(directory, FOLDER), "|".join(map(re.escape, FILES)))
        foreign = foreign or _remove(directory, rf"{IDENTITY}(\.new)?|{LOCK}")
    except OSError as error:
        raise ConfigError(
            f"{directory!r} cannot be removed whole ({error}): see to it, and repeat"
        ) from error
    finally:
        lock.release()
    if foreign:
        raise ConfigError(
            f"{directory!r} cannot be removed whole: move away what is not of the store, and "
            f"repeat: {', '.join(map(repr, foreign[:_MOST_NAMED]))}"
            f"{', and others' if len(foreign) > _MOST_NAMED else ''}"
        )


def _remove(folder: str, own: str) -> list[str]:
    """Remove the files with names of our own, and then the folder; what is in the way of that."""
    foreign = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if re.fullmatch(own, name) and os.path.isfile(path) and not os.path.islink(path):
            os.unlink(path)
        else:
            foreign.append(path)
    if not foreign:
        with suppress(FileNotFoundError):
            os.rmdir(folder)
    return foreign
