"""A preallocated file that holds a tier's slots and outlives no process."""

from __future__ import annotations

import os
from pathlib import Path

from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.sizes import format_size, parse_size


class ScratchFile:
    """A file without a header, created anew (0600, links not followed), with all blocks reserved.

    A full disk is therefore an error of `resize` and never one of a later write. ConfigError if
    the file exists or cannot be made.
    """

    def __init__(self, path: str | Path, limit: int | str | None, name: str) -> None:
        self.path = Path(path)
        self.size = 0
        """Bytes that it has, as far as its owner knows."""
        self._limit_bytes = None if limit is None else parse_size(limit, name)
        self._name = name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{name}: {str(self.path)!r} cannot be made ({error.strerror}): blocks there are "
                "scratch and never read again, so remove it or choose another path"
            ) from error

    @property
    def limit_bytes(self) -> int:
        """Bytes it could have at most, as the disk stands."""
        stats = os.fstatvfs(self.fd)
        room = self.size + stats.f_bavail * stats.f_frsize
        return room if self._limit_bytes is None else min(room, self._limit_bytes)

    def reserve(self, size: int, blocks: int) -> None:
        """Have at least `size` bytes, for so many blocks; CapacityError if they do not fit.

        TierOfflineError if something else changed the size of the file.
        """
        if self._limit_bytes is not None and size > self._limit_bytes:
            raise CapacityError(
                f"{self._name}: {blocks} blocks take {format_size(size)}, over the limit of "
                f"{format_size(self._limit_bytes)}: raise the limit"
            )
        if size:
            self._check_size()
        if size > self.size:
            self._preallocate(size)
            self.size = size

    def _check_size(self) -> None:
        found = os.fstat(self.fd).st_size
        if found != self.size:
            raise TierOfflineError(
                f"{self._name}: {str(self.path)!r} has {found} bytes, expected {self.size}: "
                "something else changed it"
            )

    def _preallocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            os.ftruncate(self.fd, self.size)
            raise CapacityError(
                f"{self._name}: no {format_size(size)} in {str(self.path)!r} ({error.strerror}): "
                "free disk space, choose another directory or lower the context"
            ) from error

    def cut(self, size: int) -> None:
        """Give back what lies beyond `size` bytes."""
        os.ftruncate(self.fd, size)
        self.size = size

    def sync(self) -> None:
        """Return when the file survives a power loss."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.size = 0
