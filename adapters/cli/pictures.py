"""Pictures drawn by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, MissingExtraError
from tierstore.whole_file import check_target, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf", "eps", "jpg", "webp")
"""Those that matplotlib writes without other programs."""


def new_figure(width: float, height: float, path: str) -> Figure:
    """An empty figure, in inches, that `save_figure` can write to `path`.

    MissingExtraError without matplotlib, ConfigError if no picture can be written there.
    """
    if _format(path) not in FORMATS:
        raise ConfigError(
            f"plot={path!r}: expected a name that ends in .{', .'.join(FORMATS)}, such as plot.png"
        )
    check_target(path, "plot")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plot", purpose="drawing a picture") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str) -> None:
    """Write a figure, in the format that the name ends in. ConfigError if that fails."""
    try:
        with replacing(path) as unfinished:
            figure.savefig(unfinished, format=_format(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plot={path!r}: cannot be written ({error}); choose a name such as plot.png in a "
            "directory that exists"
        ) from error


def _format(path: str) -> str:
    return Path(path).suffix.removeprefix(".").lower()
