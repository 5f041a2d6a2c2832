"""Writing a JSON file whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from tierstore.errors import ConfigError


def check_target(target: str | Path, what: str = "json") -> None:
    """Raise ConfigError unless a file can be written at `target`; leaves nothing there.

    what: names the argument in errors.
    """
    path = Path(target)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{what}={str(target)!r}: exists and is no file; choose another name")
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise _unwritable(target, what, error) from error


def write_json(target: str | Path, content: object) -> None:
    """Replace `target`, or what it links to, by a file with `content`; ConfigError if it fails."""
    path = Path(target).resolve()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise _unwritable(target, "json", error) from error


def _unwritable(target: str | Path, what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{what}={str(target)!r}: cannot be written ({error.strerror}); choose a file in a "
        "directory that exists and is writable"
    )
