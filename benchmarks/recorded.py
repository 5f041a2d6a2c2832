"""Recorded attention that a benchmark is given a folder of."""

from __future__ import annotations

from pathlib import Path

from tierstore.errors import ConfigError


def traces_in(folder: str, pattern: str, least: int = 1) -> list[Path]:
    """Files of that pattern, by name. ConfigError where there are fewer than `least`."""
    try:
        paths = sorted(Path(folder).glob(pattern))
    except OSError as error:
        raise ConfigError(
            f"traces={folder!r}: {error.strerror}; pass a directory of attention traces"
        ) from error
    if len(paths) < least:
        raise ConfigError(
            f"traces={folder!r}: {len(paths)} files {pattern}: expected at least {least} in that "
            "directory; tierstore trace record writes them"
        )
    return paths
