"""When each stage and each transfer ran: for people, and for Perfetto or chrome://tracing."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

TRANSFERS = "transfers: "
"""What the tracks of tiers begin with; the others are resources."""


class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds of one clock.

    track: the resource that was busy, or the tier that moved bytes. facts: whole numbers, such as
    the layer.
    """

    name: str
    track: str
    start: float
    end: float
    facts: Mapping[str, int]


class Timeline:
    """Spans in the order in which they ended. Any thread may add some.

    label: what it is a timeline of.
    """

    def __init__(self, label: str = "tierstore") -> None:
        self.label = label
        self.spans: list[Span] = []

    def add(self, name: str, track: str, start: float, end: float, **facts: int) -> None:
        """Note that `name` ran on `track`."""
        self.spans.append(Span(name, track, start, end, facts))

    @contextmanager
    def span(self, name: str, track: str, **facts: int) -> Iterator[None]:
        """Note what runs inside, also if it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, track, start, time.perf_counter(), **facts)

    def transfer(self, tier: str, verb: str, nbytes: int) -> AbstractContextManager[None]:
        """Note a transfer of so many bytes of a tier, while it is inside."""
        return self.span(f"{verb} {tier}", TRANSFERS + tier, bytes=nbytes)

    @property
    def tracks(self) -> list[str]:
        """Resources in the order of their first spans, then tiers."""
        names = dict.fromkeys(span.track for span in sorted(self.spans, key=lambda s: s.start))
        return sorted(names, key=lambda name: name.startswith(TRANSFERS))

    @property
    def seconds(self) -> float:
        """From the first start to the last end; 0 without spans."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - self.start

    @property
    def start(self) -> float:
        """When the first span starts; 0 without spans."""
        return min((span.start for span in self.spans), default=0.0)

    def busy(self, track: str) -> float:
        """Seconds in which something ran on a track, however much of it at once."""
        total, until = 0.0, float("-inf")
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.track == track and span.end > until:
                total += span.end - max(span.start, until)
                until = span.end
        return total

    def trace(self) -> dict[str, object]:
        """The trace event format of Chrome, which Perfetto reads: plain data for JSON.

        A thread for each track, and more where its spans overlap; one complete event for each span,
        microseconds from the start.
        """
        spans = sorted(self.spans, key=lambda span: span.start)
        lanes, most = _lanes(spans)
        rows = [(track, lane) for track in self.tracks for lane in range(most[track])]
        threads = {row: number for number, row in enumerate(rows, 1)}
        events: list[dict[str, object]] = [_named("process_name", 0, self.label)]
        for (track, lane), thread in threads.items():
            events.append(_named("thread_name", thread, f"{track} ({lane + 1})" if lane else track))
            order = {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread}
            events.append(order | {"args": {"sort_index": thread}})
        start = self.start
        events += [
            _event(span, threads[span.track, lane], start)
            for span, lane in zip(spans, lanes, strict=True)
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(spans: Sequence[Span]) -> tuple[list[int], dict[str, int]]:
    """Where on its track each span goes so that none overlap, and how many lanes a track needs.

    spans: in the order of their starts.
    """
    ends: dict[str, list[float]] = {}
    lanes = []
    for span in spans:
        own = ends.setdefault(span.track, [])
        lane = next((i for i, end in enumerate(own) if end <= span.start), len(own))
        own[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes, {track: len(own) for track, own in ends.items()}


def _event(span: Span, thread: int, start: float) -> dict[str, object]:
    return {
        "name": span.name,
        "cat": "transfer" if span.track.startswith(TRANSFERS) else "stage",
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "ts": 1e6 * (span.start - start),
        "dur": 1e6 * (span.end - span.start),
        "args": dict(span.facts),
    }


def _named(what: str, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}
