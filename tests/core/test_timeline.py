"""Timelines: what is busy when, and the trace format that Perfetto reads."""

from __future__ import annotations

import json

import pytest

from tierstore.timeline import Timeline


def noted() -> Timeline:
    timeline = Timeline("a test")
    timeline.add("select", "device", 10.0, 10.5, layer=0, step=3)
    timeline.add("read disk", "transfers: disk", 10.25, 11.0, bytes=4096)
    timeline.add("fetch", "disk", 10.2, 11.0, layer=0, step=3)
    timeline.add("compute", "device", 11.0, 11.25, layer=0, step=3)
    return timeline


def test_seconds_run_from_the_first_start_to_the_last_end() -> None:
    assert noted().seconds == 1.25
    assert noted().busy("device") == 0.75
    assert noted().tracks == ["device", "disk", "transfers: disk"]
    assert Timeline().seconds == Timeline().busy("device") == 0
    assert Timeline().trace()["traceEvents"][1:] == []  # type: ignore[index]


def test_a_track_that_does_two_things_at_once_is_busy_once() -> None:
    timeline = Timeline()
    timeline.add("read", "disk", 0.0, 4.0)
    timeline.add("read", "disk", 1.0, 2.0)
    timeline.add("read", "disk", 3.0, 5.0)
    timeline.add("read", "disk", 7.0, 8.0)
    assert timeline.busy("disk") == 6


def test_the_trace_has_a_thread_for_each_track_and_an_event_for_each_span() -> None:
    trace = json.loads(json.dumps(noted().trace()))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["device", "disk", "transfers: disk"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert all(e["pid"] == 1 for e in events)
    found = [(e["name"], names[e["tid"]], e["cat"], e["ts"], e["dur"]) for e in complete]
    assert [event[:3] for event in found] == [
        ("select", "device", "stage"),
        ("fetch", "disk", "stage"),
        ("read disk", "transfers: disk", "transfer"),
        ("compute", "device", "stage"),
    ]
    times = [time for event in found for time in event[3:]]
    expected = [0, 5e5, 2e5, 8e5, 2.5e5, 7.5e5, 1e6, 2.5e5]
    assert times == pytest.approx(expected)
    assert complete[2]["args"] == {"bytes": 4096}


def test_spans_of_a_track_that_overlap_get_threads_of_their_own() -> None:
    """A viewer nests what overlaps on one thread, or draws it wrongly."""
    timeline = Timeline()
    for start, end in ((0.0, 4.0), (1.0, 5.0), (2.0, 3.0), (4.0, 6.0), (5.5, 7.0)):
        timeline.add("fetch", "disk", start, end)
    events = json.loads(json.dumps(timeline.trace()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [(names[e["tid"]], e["ts"]) for e in events if e["ph"] == "X"]
    tracks = ["disk", "disk (2)", "disk (3)", "disk", "disk (2)"]
    assert found == list(zip(tracks, [0, 1e6, 2e6, 4e6, 5.5e6], strict=True))


def test_what_fails_inside_a_span_is_noted() -> None:
    timeline = Timeline()
    with pytest.raises(OSError, match="gone"), timeline.transfer("disk", "read", 64):
        raise OSError("gone")
    assert [(span.name, span.facts) for span in timeline.spans] == [("read disk", {"bytes": 64})]
