"""Private directories that are gone when their process is, however it ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from tierstore.errors import ConfigError

_PREFIX = "tierstore-"
_LOCK = ".tierstore-lock"


class PrivateDirectory:
    """A directory (0700) inside `parent` for the files of one process.

    Its lock file is locked while the process lives. `close` removes the directory, the end of the
    process does where nobody closed it, and after a kill whoever makes the next one in the same
    parent does. With `keep` nobody does.

    Parameters
    ----------
    parent: made (0700) if only its last part is missing. ConfigError if it cannot hold files.
    """

    def __init__(self, parent: str | Path, *, keep: bool = False) -> None:
        self._made_parent = _make(Path(parent))
        self._parent = Path(parent).absolute()
        self.is_kept = keep
        self._owner = os.getpid()
        self._is_closed = False
        reap(self._parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._lock = -1 if keep else _locked(self.path / _LOCK)
        except OSError as error:
            raise ConfigError(
                f"disk={str(parent)!r}: cannot hold files ({error.strerror}): choose another"
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory, and the parent if it was made for it and is empty.

        A second call, or one in a forked child, does nothing.
        """
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self.is_kept:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        if self._made_parent:
            with suppress(OSError):
                self._parent.rmdir()


def reap(parent: Path) -> list[Path]:
    """Remove private directories in `parent` whose process is gone; returns those removed."""
    removed = []
    for path in parent.glob(_PREFIX + "*"):
        if path.is_symlink():
            continue
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


def _locked(path: Path) -> int:
    """A new lock file, held before it has the name under which `reap` looks for it."""
    unnamed = path.with_suffix(".new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(unnamed, flags, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(path)
    return lock


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
            f"disk={str(directory)!r}: its parent directory {str(directory.parent)!r} does not "
            "exist: create it first"
        )
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"disk={str(directory)!r}: cannot be created ({error.strerror}): choose another"
        ) from error
    return True
