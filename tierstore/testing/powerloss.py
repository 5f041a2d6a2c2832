"""What a disk still has after a power loss: a model beside the real files.

Only content that was synced, under names that were synced, is certain. The real files hold the
newest content; the model keeps what a power loss would bring back.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4096
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

Keep = Literal["none", "all", "random"]


@dataclass(frozen=True)
class Write:
    """Bytes that came to an offset."""

    offset: int
    data: bytes

    def apply(self, fd: int) -> None:
        """Do it to a file."""
        os.pwrite(fd, self.data, self.offset)

    def pieces(self, sector: int) -> Iterator[Write]:
        """The parts in different sectors, which reach a disk one by one."""
        at, end = self.offset, self.offset + len(self.data)
        while at < end:
            stop = min(end, (at // sector + 1) * sector)
            yield Write(at, self.data[at - self.offset : stop - self.offset])
            at = stop


@dataclass(frozen=True)
class Resize:
    """A new size; `only_up` leaves a file alone that is larger."""

    size: int
    only_up: bool

    def apply(self, fd: int) -> None:
        """Do it to a file."""
        if not (self.only_up and os.fstat(fd).st_size >= self.size):
            os.ftruncate(fd, self.size)


Change = Write | Resize


class File:
    """The durable side of one file, whatever its name.

    The durable content is the real one up to `_size`, with `_old` in place of the pages in it.
    `_pending` are the changes since then, in order. What a failed sync gave up is in none of both:
    the real file has it, the disk does not, and no later sync brings it there.
    """

    def __init__(self, path: str, *, is_new: bool) -> None:
        self._fd = os.open(path, _OPEN)
        weakref.finalize(self, os.close, self._fd)
        self._size = 0 if is_new else os.fstat(self._fd).st_size
        self._old: dict[int, bytes] = {}
        self._pending: list[tuple[int, Change]] = []
        self._has_lost = False
        self.changes = 0
        """Changes so far: what a sync covers that begins now."""

    def is_at(self, path: str) -> bool:
        """Whether the real file has that name."""
        mine, there = os.fstat(self._fd), os.stat(path, follow_symlinks=False)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def before_write(self, offset: int, nbytes: int) -> None:
        """Keep what a write is about to replace. Requires: the write has not begun."""
        first, end = offset // PAGE, -(-(offset + nbytes) // PAGE)
        if all(page in self._old for page in range(first, end)):
            return
        content = os.pread(self._fd, (end - first) * PAGE, first * PAGE)
        for page in range(first, end):
            start = (page - first) * PAGE
            self._old.setdefault(page, content[start : start + PAGE].ljust(PAGE, b"\0"))

    def before_resize(self, size: int) -> None:
        """Keep what a cut to `size` is about to remove. Requires: the cut has not begun."""
        end = os.fstat(self._fd).st_size
        for start, stop in _data_ranges(self._fd, size, end):
            self.before_write(start, stop - start)

    def note(self, change: Change) -> None:
        """A change happened to the real file."""
        self.changes += 1
        self._pending.append((self.changes, change))

    def sync(self, covered: int) -> None:
        """The first `covered` changes are durable, save those that an earlier sync gave up."""
        if covered >= self.changes and not self._has_lost:
            self._old.clear()
            self._size = os.fstat(self._fd).st_size
        else:
            for number, change in self._pending:
                if number <= covered:
                    self._make_durable(change)
            if covered >= self.changes:
                self._size = os.fstat(self._fd).st_size
        self._drop(covered)

    def fail_sync(self, covered: int) -> None:
        """The system marked the first `covered` changes as written, but they are not."""
        before = len(self._pending)
        self._drop(covered)
        self._has_lost |= len(self._pending) < before

    def _drop(self, covered: int) -> None:
        self._pending = [entry for entry in self._pending if entry[0] > covered]

    def _make_durable(self, change: Change) -> None:
        if isinstance(change, Write):
            self._size = max(self._size, change.offset + len(change.data))
            for piece in change.pieces(PAGE):
                page, at = divmod(piece.offset, PAGE)
                old = self._old[page]
                self._old[page] = old[:at] + piece.data + old[at + len(piece.data) :]
            return
        if change.size < self._size and not change.only_up:
            for page, old in self._old.items():
                kept = min(max(change.size - page * PAGE, 0), PAGE)
                self._old[page] = old[:kept].ljust(PAGE, b"\0")
        self._size = max(self._size, change.size) if change.only_up else change.size

    def write_to(self, path: str, keep: Keep, tear: int | None, coin: random.Random) -> None:
        """Make a file as a power loss could leave this one."""
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(target, stat.S_IMODE(os.fstat(self._fd).st_mode))
            self._write_durable(target)
            for change in _survivors([change for _, change in self._pending], keep, tear, coin):
                change.apply(target)
        finally:
            os.close(target)

    def _write_durable(self, target: int) -> None:
        os.ftruncate(target, self._size)
        for start, stop in _data_ranges(self._fd, 0, self._size):
            at = start
            while at < stop:
                data = os.pread(self._fd, min(stop - at, 1 << 20), at)
                if not data:
                    break
                at += os.pwrite(target, data, at)
        for page, old in self._old.items():
            kept = old[: max(0, self._size - page * PAGE)]
            os.pwrite(target, kept, page * PAGE)


def _survivors(
    pending: list[Change], keep: Keep, tear: int | None, coin: random.Random
) -> list[Change]:
    """Those changes that reached the disk, or pieces of them."""
    if keep == "none":
        return []
    kept: list[Change] = []
    for number, change in enumerate(pending):
        may_tear = keep == "random" or number == len(pending) - 1
        if tear and may_tear and isinstance(change, Write):
            pieces = [piece for piece in change.pieces(tear) if coin.random() < 0.5]
            kept.extend(pieces)
        elif keep == "all" or coin.random() < 0.5:
            kept.append(change)
    return kept


def _data_ranges(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Parts of a range of a file that hold data, where the file system knows of holes."""
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:  # nothing but a hole up to the end
            return
        stop = min(end, os.lseek(fd, start, os.SEEK_HOLE))
        if start < stop:
            yield start, stop
        start = stop


class Folder:
    """A directory as what a name stands for."""


Named = File | Folder | None
"""What a name stands for; None: there is nothing of that name."""


class Disk:
    """The files and names below a directory. Not thread-safe.

    `_durable` has the names that ever changed, as they are on the disk; other names are as they
    are in the real directory. `_pending` are the changes of names since then, in order: of which
    directory, and what its names then stood for. Names whose directory is not there are not there.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._files: dict[str, File] = {}
        self._durable: dict[str, Named] = {}
        self._pending: list[tuple[str, dict[str, Named]]] = []

    def file(self, path: str, *, is_new: bool = False) -> File | None:
        """The file of that name; None if it is no regular file below the root."""
        path = os.path.abspath(path)
        if not path.startswith(self.root + os.sep):
            return None
        if not os.path.isfile(path) or os.path.islink(path):
            return None
        known = self._files.get(path)
        if known is None or is_new or not known.is_at(path):
            known = self._files[path] = File(path, is_new=is_new)
        return known

    def note_new(self, path: str, named: Named) -> None:
        """A name was made."""
        self._rename({path: named}, {path: None})

    def note_remove(self, path: str, file: File) -> None:
        """A file was removed."""
        self._rename({path: None}, {path: file})
        self._files.pop(os.path.abspath(path), None)

    def note_rename(self, source: str, target: str, file: File, replaced: File | None) -> None:
        """A file got another name. In two directories, one name can be durable before the other."""
        before: dict[str, Named] = {source: file, target: replaced}
        if os.path.dirname(os.path.abspath(source)) == os.path.dirname(os.path.abspath(target)):
            self._rename({target: file, source: None}, before)
        else:
            self._rename({target: file}, before)
            self._rename({source: None}, {})
        self._files.pop(os.path.abspath(source), None)
        self._files[os.path.abspath(target)] = file

    def _rename(self, after: dict[str, Named], before: dict[str, Named]) -> None:
        for path, named in before.items():
            self._durable.setdefault(os.path.abspath(path), named)
        names = {os.path.abspath(path): named for path, named in after.items()}
        self._pending.append((os.path.dirname(next(iter(names))), names))

    def changes_in(self, directory: str) -> list[dict[str, Named]]:
        """What a sync of a directory covers that begins now."""
        folder = os.path.abspath(directory)
        return [names for parent, names in self._pending if parent == folder]

    def sync_names(self, covered: list[dict[str, Named]]) -> None:
        """Those changes of names are durable."""
        for names in covered:
            self._durable.update(names)
        self._pending = [
            (parent, names)
            for parent, names in self._pending
            if not any(names is synced for synced in covered)
        ]

    def crash(
        self,
        into: Path,
        keep: Keep,
        tear: int | None,
        seed: int,
        copy: Callable[[Path, Path], object],
    ) -> None:
        """Write what a power loss could leave; files that are not known are copied."""
        into.mkdir(parents=True, exist_ok=True)
        if any(into.iterdir()):
            raise ConfigError(f"crash(into={str(into)!r}): expected an empty or new directory")
        coin = random.Random(seed)
        names = self._names_after(keep, coin)
        for path in sorted(self._paths() | set(names)):
            if path == self.root or not self._can_have(path, names):
                continue
            target = into / os.path.relpath(path, self.root)
            named = names.get(path, self._files.get(path))
            if isinstance(named, File):
                named.write_to(str(target), keep, tear, coin)
            elif isinstance(named, Folder) or (path not in names and os.path.isdir(path)):
                target.mkdir(mode=0o700)
            elif path not in names and os.path.isfile(path) and not os.path.islink(path):
                copy(Path(path), target)

    def _names_after(self, keep: Keep, coin: random.Random) -> dict[str, Named]:
        names = dict(self._durable)
        for _, change in self._pending:
            if keep == "all" or (keep == "random" and coin.random() < 0.5):
                names.update(change)
        return names

    def _can_have(self, path: str, names: dict[str, Named]) -> bool:
        """Whether all directories above a name are there, and are directories."""
        parent = os.path.dirname(path)
        while parent != self.root:
            if parent in names and not isinstance(names[parent], Folder):
                return False
            parent = os.path.dirname(parent)
        return True

    def _paths(self) -> set[str]:
        return {
            os.path.join(folder, name)
            for folder, folders, files in os.walk(self.root)
            for name in [*folders, *files]
        }


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its mode."""
    shutil.copy(source, target)
