"""Timelines as files: a trace for Perfetto, or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.cli.json_file import write_json
from tierstore.adapters.cli.pictures import new_figure, save_figure
from tierstore.timeline import TRANSFERS, Timeline
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    from tierstore.timeline import Span

_LAYERS = 4
"""Layers of the last step that a picture shows; more are too narrow to be seen."""


def check_timeline(path: str) -> None:
    """Raise what `save_timeline` would, before there is something to save."""
    if _is_trace(path):
        check_target(path, "timeline")
    else:
        new_figure(1, 1, path)


def save_timeline(timeline: Timeline, path: str) -> None:
    """Write all of it as a trace for Perfetto (``.json``), or its last step's start as a picture.

    ConfigError if the file cannot be written; MissingExtraError for a picture without matplotlib.
    """
    if _is_trace(path):
        write_json(path, timeline.trace())
    else:
        draw(_last_step(timeline), path)


def _is_trace(path: str) -> bool:
    return Path(path).suffix.lower() == ".json"


def _last_step(timeline: Timeline) -> Timeline:
    """What ran in the first layers of the last step."""
    steps = [span for span in timeline.spans if "step" in span.facts]
    last = max((span.facts["step"] for span in steps), default=0)
    mine = [s for s in steps if s.facts["step"] == last and s.facts["layer"] < _LAYERS]
    part = Timeline(timeline.label)
    if mine:
        start, end = min(span.start for span in mine), max(span.end for span in mine)
        part.spans = [span for span in timeline.spans if start <= span.start and span.end <= end]
    return part


def draw(timeline: Timeline, path: str) -> None:
    """Draw a bar for each span, a row for each resource and tier; what is blank is idle.

    MissingExtraError without matplotlib, ConfigError if the file cannot be written.
    """
    tracks = timeline.tracks
    figure = new_figure(12, 1.2 + 0.6 * len(tracks), path)
    axes = figure.subplots()
    names = list(dict.fromkeys(_kind(span) for span in timeline.spans))
    for number, name in enumerate(names):
        label = name
        for row, track in enumerate(tracks):
            bars = [
                (1e3 * (span.start - timeline.start), 1e3 * (span.end - span.start))
                for span in timeline.spans
                if span.track == track and _kind(span) == name
            ]
            if bars:
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), color=f"C{number}", edgecolor="white", linewidth=0.5,
                    label=label,
                )  # fmt: skip
                label = "_again"
    total = timeline.seconds or 1.0
    ticks = [f"{track}\n{timeline.busy(track) / total:.0%} busy" for track in tracks]
    axes.set_yticks(range(len(tracks)), ticks)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms ({timeline.label})")
    if names:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)


def _kind(span: Span) -> str:
    return "transfer" if span.track.startswith(TRANSFERS) else span.name
