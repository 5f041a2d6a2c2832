"""Private directories that are gone when their process is, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tierstore.errors import ConfigError

_PREFIX = "tierstore-"
_LOCK = "lock"


class PrivateDirectory:
    """A directory (0700) inside `parent` for the files of one process.

    Its lock file is locked while the process lives. Whoever makes the next one in the same parent removes
    those whose lock nobody holds: a process that was killed leaves nothing for longer than that. With
    `keep`, `close` leaves the directory and a mark that stops others from removing it.

    Parameters
    ----------
    parent: made (0700) if only its last part is missing. ConfigError if it cannot hold files.
    """

    def __init__(self, parent: str | Path, *, keep: bool = False) -> None:
        self._parent = Path(parent)
        self._made_parent = _make(self._parent)
        self.keep = keep
        reap(self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self.path / _LOCK, flags, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._owner = os.getpid()

    def close(self) -> None:
        """Remove the directory (not with `keep`). A second call, or one in a forked child, does nothing."""
        if self._lock < 0 or os.getpid() != self._owner:
            return
        if self.keep:
            (self.path / _LOCK).unlink()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._made_parent and not any(self._parent.iterdir()):
                self._parent.rmdir()
        os.close(self._lock)
        self._lock = -1


def reap(parent: Path) -> list[Path]:
    """Remove private directories in `parent` whose process is gone; returns those removed."""
    removed = []
    for path in parent.glob(_PREFIX + "*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed


def _make(directory: Path) -> bool:
    if directory.is_dir():
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"disk={str(directory)!r}: the directory is not writable: choose another"
            )
        return False
    if directory.exists() or directory.is_symlink():
        raise ConfigError(
            f"disk={str(directory)!r}: expected a directory, found something else: choose another"
        )
    if not directory.parent.is_dir():
        raise ConfigError(
            f"disk={str(directory)!r}: its parent directory {str(directory.parent)!r} does not exist: create it first"
        )
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"disk={str(directory)!r}: cannot be created ({error.strerror}): choose another"
        ) from error
    return True
