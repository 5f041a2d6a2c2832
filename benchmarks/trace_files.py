"""Which attention traces a benchmark replays."""

from __future__ import annotations

from pathlib import Path

from tierstore.errors import ConfigError

SUFFIX = ".trace"


def trace_files(where: str) -> list[Path]:
    """Files with commas between, or those in a directory. ConfigError if there are none."""
    folder = Path(where)
    if not folder.is_dir():
        return [Path(name) for name in where.split(",")]
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"traces={where!r}: no *{SUFFIX} in that directory; make some with tierstore trace "
            "record"
        )
    return paths
