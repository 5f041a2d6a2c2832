"""``tierstore bench policies``: what it reports of a directory of traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attention_traces import drifting
from bench_schema import KEYS

from tierstore.adapters.cli import main
from tierstore.benchmarks import policies, policy_cost
from tierstore.policies import LRU
from tierstore.policies.attention import ATTENTION_POLICIES
from tierstore.policies.comparison import FIRST_STEP
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small traces of exact scores; costs are measured on two layers."""
    monkeypatch.setattr(policy_cost, "LAYERS", 2)
    for seed in range(2):
        trace = drifting(seed, steps=40, blocks=300)
        named = replace(trace, facts={**trace.facts, "preset": "exact"})
        named.save(tmp_path / f"{seed}.trace")
    return tmp_path


def test_every_policy_is_replayed_in_every_window(traces: Path) -> None:
    findings = policies.run(lambda _: None, traces=str(traces), repeat=1)
    record = findings.to_dict()
    assert set(record) == KEYS
    cases = len(policies.BUDGETS) * len(policies.WINDOWS)
    hits = [name for name in findings.measures if name.startswith("hits: ")]
    assert len(hits) == cases
    for name in hits:
        values = findings.measures[name].values
        assert set(values) == {*ATTENTION_POLICIES, "belady"}
        assert all(len(each) == 2 for each in values.values())
        best = np.array(values["belady"])
        assert all((best >= np.array(each)).all() for each in values.values())
        gap = findings.measures[name.replace("hits", "gap closed")].values
        assert gap["lru"] == [0.0, 0.0]
        assert gap["belady"] == [1.0, 1.0]
    assert any("time of Blend in a layer" in ratio.says for ratio in findings.ratios)
    assert "Adaptive loses at most" in findings.notes[-1]


def test_a_hit_ratio_is_that_of_the_replay(traces: Path) -> None:
    hits, _ = policies.hit_ratios(lambda _: None, sorted(traces.glob("*.trace")))
    case = policies.Case("exact", 1 / 16, 2.0)
    trace = drifting(1, steps=40, blocks=300).with_budget(1 / 16)
    windows = np.full(trace.segments, 2 * int(trace.counts.max()), np.int64)
    expected = replay(trace, LRU(), windows).hit_ratio(FIRST_STEP)
    assert hits[case]["lru"][1] == expected


def test_a_trace_without_a_gap_has_no_share_of_it(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that hold everything: what every policy fetches is the first use of each block."""
    monkeypatch.setattr(policies, "WINDOWS", (2.0, 1000.0))
    findings = policies.run(lambda _: None, traces=str(traces), repeat=1)
    gaps = [name for name in findings.measures if name.startswith("gap closed")]
    assert len(gaps) == len(policies.BUDGETS)
    assert not any("x1000" in ratio.says for ratio in findings.ratios)
    assert "blend +0.00 points (0 % of the gap)" in findings.notes[1]
    findings.to_dict()


def test_a_directory_without_traces_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "policies", "--traces", str(tmp_path)]) == 2
    assert "0 files *.trace: expected at least 1" in capsys.readouterr().err
    assert main(["bench", "policies"]) == 2
    assert "traces=None: expected a directory" in capsys.readouterr().err


def test_traces_that_cannot_be_replayed_are_refused_by_name(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counting begins at step 16, so that a trace needs more."""
    trace = AttentionTrace.load(traces / "0.trace")
    steps = int(trace.counts[:FIRST_STEP].sum())
    few = replace(
        trace,
        blocks=trace.blocks[:FIRST_STEP],
        unit_scores=trace.unit_scores[:FIRST_STEP],
        counts=trace.counts[:FIRST_STEP],
        ids=trace.ids[:steps],
    )
    few.save(traces / "0.trace")
    assert main(["bench", "policies", "--traces", str(traces)]) == 2
    assert "0.trace: expected at least 17 steps, found 16" in capsys.readouterr().err
    (traces / "0.trace").unlink()
    (traces / "0.trace").mkdir()
    assert main(["bench", "policies", "--traces", str(traces)]) == 2
    assert "0.trace': Is a directory; pass a file" in capsys.readouterr().err
    assert main(["bench", "policies", "--traces", "n" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err
