"""``tierstore generate --timeline``: a trace or a picture, and what is refused."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import llama

from tierstore.adapters.cli import main
from tierstore.adapters.cli.timeline import save_timeline
from tierstore.adapters.transformers import attach
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path

ASK = ["generate", "--document", "builtin", "--question", "builtin", "--dram", "1MiB"]


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    """What an attached model does in four steps of three texts."""
    timeline, model = Timeline("tiny"), llama()
    folder = tmp_path_factory.mktemp("kv")
    with (
        torch.inference_mode(),
        attach(
            model, budget=0.1, fast="2MiB", disk=folder / "kv", micro_batch=1, timeline=timeline
        ) as cache,
    ):
        prompt = torch.randint(0, 32, (3, 200))
        model.generate(prompt, **cache.kwargs, max_new_tokens=5, do_sample=False)
    return timeline


def test_a_trace_has_the_stages_of_every_layer_and_micro_batch(
    timeline: Timeline, tmp_path: Path
) -> None:
    target = tmp_path / "step.json"
    save_timeline(timeline, str(target))
    events = json.loads(target.read_text())["traceEvents"]
    stages = [event for event in events if event.get("cat") == "stage"]
    names = [event["name"] for event in stages]
    layers = {event["args"]["layer"] for event in stages}
    steps = {event["args"]["step"] for event in stages}
    assert names.count("compute") == len(layers) * len(steps)
    assert names.count("fetch") == names.count("select") == 3 * names.count("compute")
    assert any(event.get("cat") == "transfer" for event in events)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in stages)


@pytest.mark.parametrize("name", ["step.png", "step.svg"])
def test_a_picture_is_drawn(timeline: Timeline, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot")
    target = tmp_path / name
    save_timeline(timeline, str(target))
    start = target.read_bytes()[:4]
    assert start == b"\x89PNG" if name.endswith("png") else start == b"<?xm"


def test_a_timeline_without_spans_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot")
    save_timeline(Timeline(), str(tmp_path / "nothing.png"))
    assert (tmp_path / "nothing.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/step.json", "timeline="), ("step.txt", "expected a name that ends in .png")],
)
def test_where_it_cannot_be_written_is_said_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main([*ASK, "--timeline", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_needs_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*ASK, "--timeline", str(tmp_path / "step.png")]) == 2
    assert "pip install 'tierstore[plot]'" in capsys.readouterr().err
