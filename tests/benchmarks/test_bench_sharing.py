"""The benchmarks of hysteresis and of windows on a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from bench_schema import as_json

from tierstore.adapters.cli.recording import record_trace
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks import hysteresis, windows
from tierstore.benchmarks.facts import Fact
from tierstore.benchmarks.language import real_text
from tierstore.errors import ConfigError, TraceError
from tierstore.traces.attention import AttentionTrace

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel


def quiet(progress: str) -> None:
    """Nobody listens."""


def test_hysteresis_is_measured_for_every_difference(tiny_model: LoadedModel) -> None:
    said: list[str] = []
    found = hysteresis.measure(
        said.append, tiny_model, tokens=900, starts=(0, 9_000), steps=12,
        facts=(Fact("Rome", 12_345, 0.2),),
    )  # fmt: skip
    data = as_json(found)
    assert {len(each) for each in data["measures"]["KL"]["values"].values()} == {2}
    fetched = data["measures"]["fetched"]["values"]
    for index in ("exact", "kvdrive"):
        amounts = [
            sum(fetched[f"{index}, {name} 3.125%"])
            for name in ("residents", "0.5 nats", "1 nats", "2 nats")
        ]
        assert amounts == sorted(amounts, reverse=True)
        assert amounts[0] > amounts[-1]
    assert len(data["measures"]["facts"]["values"]["full"]) == 1


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 files exact-\*\.trace: expected at least 2"):
        windows.run(quiet, traces=str(tmp_path))


def test_traces_that_plans_cannot_be_made_of_are_refused(tmp_path: Path) -> None:
    """Of two models, of too few steps, without what heads give to blocks."""
    random = np.random.default_rng(0)

    def save(name: str, steps: int, heads: int, **facts: object) -> None:
        trace = AttentionTrace(
            {
                "block_tokens": 4, "context_tokens": 160, "layers": 1, "kv_heads": heads,
                "query_heads": 6, "head_dim": 16, "selectable": [0.5] * heads, **facts,
            },
            np.full((steps, heads), 40, np.int32),
            random.normal(-4, 1, (steps, heads, 40)).astype(np.float16),
            np.arange(40, dtype=np.int32)[None],
            np.zeros((steps, heads), np.int32),
            np.empty(0, np.int32),
        )  # fmt: skip
        trace.with_budget(0.1).save(tmp_path / f"exact-{name}.trace")

    save("a", windows.FIRST + 1, 2)
    save("b", windows.FIRST, 2)
    with pytest.raises(TraceError, match=r"exact-b\.trace: expected at least 97 steps, found 96"):
        windows.run(quiet, traces=str(tmp_path))
    save("b", windows.FIRST + 1, 3)
    with pytest.raises(ConfigError, match="2 kinds of models"):
        windows.run(quiet, traces=str(tmp_path))
    save("b", windows.FIRST + 1, 2, selectable=None)
    with pytest.raises(TraceError, match=r"exact-b\.trace: fact selectable: .*found none"):
        windows.run(quiet, traces=str(tmp_path))
    save("b", windows.FIRST + 1, 2)
    with pytest.raises(ConfigError, match="nothing to save"):
        windows.run(quiet, traces=str(tmp_path), budget="100%")


@pytest.mark.parametrize("window", [1.5, 3.0])
def test_windows_are_tried_on_other_documents(tiny_model: LoadedModel, window: float) -> None:
    traces = []
    for start in (0, 30_000):
        text = real_text(tiny_model.tokenizer, 500, start)
        traces.append(
            record_trace(
                tiny_model, text[:380], text[380:], 120, PRESETS["exact"], document=f"from {start}"
            )
        )
    data = as_json(windows.measure(quiet, traces, budget="10%", sizes=(window,)))
    fetched = data["measures"][f"fetched at x{window:g}"]["values"]
    assert set(fetched) == set(windows.CONFIGURATIONS)
    expected = data["measures"][f"expected at x{window:g}"]["values"]
    for greedy, exact in zip(expected["greedy"], expected["exact"], strict=True):
        assert exact <= greedy + 1e-9
    missed = data["measures"]["missed mass"]["values"]
    for even, best in zip(missed["uniform"], missed["hindsight"], strict=True):
        assert 0 < best <= even < 1
    assert data["notes"][0].startswith("All documents together, fetched at")
