"""``tierstore trace replay`` of attention traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attention_traces import drifting

from tierstore.adapters.cli import main
from tierstore.adapters.cli.attention_replay import NAMES
from tierstore.policies import LRU, Clairvoyant
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from tierstore.traces.attention import AttentionTrace

FIRST_STEP = 16


@pytest.fixture
def trace() -> AttentionTrace:
    made = drifting(0, steps=40, blocks=200, budget=10)
    facts = {"dtype": "float32", "head_dim": 8, "value_size": 4, "document": "a.txt"}
    return replace(made, facts={**made.facts, **facts})


@pytest.fixture
def path(trace: AttentionTrace, tmp_path: Path) -> str:
    trace.save(tmp_path / "a.trace")
    return str(tmp_path / "a.trace")


def replayed(path: str, tmp_path: Path, *options: str) -> list[dict[str, object]]:
    target = tmp_path / "out.json"
    assert main(["trace", "replay", path, *options, "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["schema"] == 1
    assert content["trace"]["block_bytes"] == 4 * 12 * 4
    rows: list[dict[str, object]] = content["rows"]
    return rows


def test_rows_are_those_of_the_replay(
    trace: AttentionTrace, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = replayed(path, tmp_path, "--policies", "lru,blend,belady", "--capacity", "x2")
    windows = np.full(trace.segments, 20, np.int64)
    lru = replay(trace, LRU(), windows)
    best = replay(trace, Clairvoyant.of(list(trace.selections())), windows)
    assert [row["policy"] for row in rows] == ["lru", "blend", "belady"]
    assert rows[0] == {
        "policy": "lru",
        "window": 2.0,
        "blocks": 20,
        "hit_ratio": lru.hit_ratio(FIRST_STEP),
        "moved": lru.fetched[FIRST_STEP:].sum(1).mean(),
        "gap_closed": 0.0,
    }
    assert rows[2]["hit_ratio"] == best.hit_ratio(FIRST_STEP)
    assert rows[2]["gap_closed"] == 1.0
    gap = best.hit_ratio(FIRST_STEP) - lru.hit_ratio(FIRST_STEP)
    gain = float(str(rows[1]["hit_ratio"])) - lru.hit_ratio(FIRST_STEP)
    assert rows[1]["gap_closed"] == pytest.approx(gain / gap)
    assert "40 steps of 3 segments of " in capsys.readouterr().out


def test_all_policies_and_windows_by_default(path: str, tmp_path: Path) -> None:
    rows = replayed(path, tmp_path)
    assert [row["policy"] for row in rows] == list(NAMES) * 3
    assert [row["blocks"] for row in rows[:: len(NAMES)]] == [15, 20, 30]


def test_another_budget_takes_other_windows(path: str, tmp_path: Path) -> None:
    """2 % of 200 blocks are 4; a tenth of a segment's 120 blocks, 12."""
    rows = replayed(path, tmp_path, "--budget", "2%", "--capacity", "x2,10%,9", "--policies", "lru")
    most = int(drifting(0, steps=40, blocks=200, budget=10).blocks.max())
    assert [row["blocks"] for row in rows] == [8, most // 10, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "sieve"], "policies='sieve': expected all, or of random, lru"),
        (["--capacity", "x0.9"], "capacity='x0.9': expected budgets such as x2"),
        (["--capacity", ""], "capacity=''"),
        (["--capacity", "9" * 23], "capacity='999"),
        (["--capacity", "9"], "at least the 10 that a step selects"),
        (["--capacity", "xnan"], "capacity='xnan'"),
        (["--capacity", "xinf"], "capacity='xinf'"),
        (["--budget", "0"], "budget"),
    ],
)
def test_bad_options_are_refused(
    path: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "replay", path, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_budget_means_nothing_to_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n')
    assert main(["trace", "replay", str(tmp_path / "a.jsonl"), "--budget", "5%"]) == 2
    assert "--budget: means nothing" in capsys.readouterr().err


def test_a_plot_is_written(path: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "x.svg"
    options = ["--policies", "lru", "--plot", str(target)]
    assert main(["trace", "replay", path, *options]) == 0
    assert "<svg" in target.read_text()


@pytest.mark.parametrize("value", [10**400, -1, True, "8", float("nan")])
def test_a_wrong_fact_is_refused_with_the_name_of_the_file(
    value: object, trace: AttentionTrace, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(trace, facts={**trace.facts, "head_dim": value}).save(Path(path))
    assert main(["trace", "replay", path, "--policies", "lru"]) == 2
    output = capsys.readouterr()
    assert f"{path}: fact head_dim: expected a whole number from 1 to" in output.err
    assert output.out == ""


def test_a_name_that_no_encoding_has_is_shown_without_harm(
    trace: AttentionTrace, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(trace, facts={**trace.facts, "document": "\ud800\x1b[31m"}).save(Path(path))
    assert main(["trace", "replay", path, "--policies", "lru"]) == 0
    assert "blocks: ?\ufffd[31m" in capsys.readouterr().out
