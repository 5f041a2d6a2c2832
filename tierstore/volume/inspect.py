"""Opening stores that somebody else made, as they are on disk: for tools."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import ConfigError, CorruptBlockError, StoreMismatchError
from tierstore.io import FileIO
from tierstore.volume.capacity import capacity_of
from tierstore.volume.namespace import IDENTITY, SEGMENT_NAME, SEGMENTS, read_facts
from tierstore.volume.volume import Volume

if TYPE_CHECKING:
    from tierstore.identity import Facts


def namespaces(path: str | os.PathLike[str]) -> list[str]:
    """Directories of the namespaces in a store's directory, or `path` itself if it is one.

    ConfigError if there is none.
    """
    root = os.path.abspath(path)
    if is_namespace(root):
        return [root]
    try:
        found = [entry.path for entry in os.scandir(root) if not entry.is_symlink()]
    except OSError as error:
        raise ConfigError(
            f"path={root!r} cannot be read ({error.strerror}): give the directory of a store, or "
            "of one of its namespaces"
        ) from error
    own = sorted(filter(is_namespace, found))
    if not own:
        raise ConfigError(
            f"path={root!r} holds no store: give the directory that was given to KeyedStore, or "
            "one of the namespaces in it"
        )
    return own


def is_namespace(directory: str) -> bool:
    """Whether a directory is, or was, that of a namespace."""
    return any(os.path.lexists(os.path.join(directory, name)) for name in (IDENTITY, SEGMENTS))


def facts_of(directory: str, io: FileIO | None = None) -> Facts:
    """Whose values a namespace holds.

    CorruptBlockError if its file ``IDENTITY`` is damaged or missing, StoreMismatchError if it is of
    another version or in a directory of another name.
    """
    path = os.path.join(directory, IDENTITY)
    facts = read_facts(FileIO() if io is None else io, path)
    if facts is None:
        raise CorruptBlockError(
            f"{path!r} is damaged or missing: open the store with its own identity, which writes "
            "it anew"
        )
    folder = facts.identity.folder
    if os.path.basename(directory) != folder:
        raise StoreMismatchError(
            f"{directory!r} is the namespace {folder!r} under another name: name it that"
        )
    return facts


def open_volume(directory: str, *, read_only: bool = True, io: FileIO | None = None) -> Volume:
    """A namespace with its own identity, segment size, and as many segments as there are.

    Errors are those of `facts_of` and `Volume`; so CapacityError and StoreLockedError.
    """
    io = FileIO() if io is None else io
    facts = facts_of(directory, io)
    try:
        names = io.list(os.path.join(directory, SEGMENTS))
    except FileNotFoundError:
        names = []
    segments = sum(SEGMENT_NAME.fullmatch(name) is not None for name in names)
    return Volume(
        os.path.dirname(directory),
        facts.identity,
        capacity_bytes=capacity_of(max(1, segments), facts.segment_bytes),
        segment_bytes=None,
        recovery="quiet",
        read_only=read_only,
        io=io,
    )


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The extents of one size in a volume.

    records: extents that hold a value. evictable: those of them that nobody has pinned.
    stored_bytes: of the values, as they are on disk.
    """

    extent_bytes: int
    segments: int
    extents: int
    records: int
    evictable: int
    stored_bytes: int

    @property
    def occupancy(self) -> float:
        """Share of the extents that hold a value."""
        return self.records / self.extents


def size_classes(volume: Volume) -> list[SizeClass]:
    """What is in use of a volume, from the smallest extents to the largest."""
    found: dict[int, SizeClass] = {}
    with volume.lock:
        stored_bytes = volume.records.rows["stored_bytes"]
        for segment in volume.files.by_number.values():
            if segment.is_blank or segment.is_draining:
                continue
            size = segment.header.extent_bytes
            live = volume.files.live(segment)
            before = found.get(size, SizeClass(size, 0, 0, 0, 0, 0))
            found[size] = SizeClass(
                size,
                before.segments + 1,
                before.extents + segment.header.extents,
                before.records + len(live),
                before.evictable + int((volume.records.pins[live] == 0).sum()),
                before.stored_bytes + int(stored_bytes[live].sum(dtype=np.int64)),
            )
    return [found[size] for size in sorted(found)]
