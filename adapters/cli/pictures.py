"""Pictures drawn by matplotlib, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plot", purpose="drawing a picture") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str) -> None:
    """Write a figure, in the format that the name ends in. ConfigError if that fails."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plot={path!r}: cannot be written ({error}); choose a name such as plot.png in a "
            "directory that exists"
        ) from error
