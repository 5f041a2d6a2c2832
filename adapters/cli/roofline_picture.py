"""The roofline as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.cli.pictures import new_figure, save_figure
from tierstore.roofline import crossing, host_roof, roofs

if TYPE_CHECKING:
    from tierstore.hardware import Hardware

_INTENSITIES = np.geomspace(0.25, 4096, 200)
_DASHED = ("host", "disk")


def draw(hardware: Hardware, path: str) -> None:
    """Draw intensity against attainable FLOP/s, with the crossing point P.

    MissingExtraError without matplotlib, ConfigError if the file cannot be written.
    """
    figure = new_figure(8, 5, path)
    axis = figure.subplots()
    for roof in roofs(hardware):
        values = [roof.attainable(float(at)) / 1e9 for at in _INTENSITIES]
        style = "--" if any(word in roof.name for word in _DASHED) else "-"
        axis.plot(_INTENSITIES, values, style, label=roof.name)
    point = crossing(hardware)
    if 0 < point < math.inf:
        height = host_roof(hardware).attainable(point) / 1e9
        axis.plot([point], [height], "ko")
        axis.annotate(f"P = {point:.3g}", (point, height), (6, -14), textcoords="offset points")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP for each byte attended to (query heads per KV head, in 16 bits)",
        ylabel="attainable GFLOP/s",
        title=f"Attention on {hardware.name}",
    )
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(fontsize="small")
    save_figure(figure, path)
