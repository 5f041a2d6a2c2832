"""One process at a time writes in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from tierstore.errors import StoreLockedError

LOCK = "LOCK"


class DirectoryLock:
    """The lock of a directory, held until `release`; a killed holder's lock is free at once.

    StoreLockedError, with the holder's process id, if another process has it. With `shared`,
    several readers hold it together.

    The lock belongs to the open file: a child made by fork shares it and must not use the store.
    """

    def __init__(self, directory: str, *, shared: bool = False) -> None:
        self._path = os.path.join(directory, LOCK)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StoreLockedError(
                f"{directory!r} is open in process {holder or 'unknown'}: close it there, or "
                "choose another directory; one process at a time may have it"
            ) from error
        if not shared:
            with suppress(OSError):  # a full disk; the number only makes errors clearer
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let others have the directory. A second call does nothing."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for a child that has the file open too
            os.close(self._fd)
            self._fd = -1
