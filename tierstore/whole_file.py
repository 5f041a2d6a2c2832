"""Files that appear whole or not at all, and whether one can."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replacing(target: str | Path) -> Iterator[Path]:
    """A new hidden file beside `target` to write, which then takes its place, or that of its link.

    Its name is short, so that every name that a file can have will do. After an exception, OSError
    among them, what was there before is there still, and nothing beside it.
    """
    path = Path(os.path.realpath(target))
    unfinished = path.with_name(f".{secrets.token_hex(8)}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_target(target: str | Path, what: str) -> None:
    """Raise ConfigError unless a file can be written at `target`; leaves nothing there.

    what: names the argument in errors.
    """
    path = Path(os.path.realpath(target))
    try:
        if not _is_free(path):
            raise ConfigError(f"{what}={str(target)!r}: exists and is no file; choose another name")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise unwritable(target, what, error) from error


def unwritable(target: str | Path, what: str, error: OSError) -> ConfigError:
    """What to raise where a file could not be written."""
    return ConfigError(
        f"{what}={str(target)!r}: cannot be written ({error.strerror}); choose a file in a "
        "directory that exists and is writable"
    )


def _is_free(path: Path) -> bool:
    """Whether there is a file, or nothing. OSError where no file can have that name."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True
