"""``tierstore trace``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierstore.adapters.cli import main
from tierstore.adapters.cli.pictures import FORMATS, new_figure, save_figure
from tierstore.policies.replay import POLICIES
from tierstore.traces.requests import RequestTrace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two chains with a common root; the first comes again, then its root alone."""
    blocks = np.array([1, 2, 3, 1, 4, 1, 2, 3, 1], np.uint64)
    RequestTrace(np.array([0, 3, 5, 8, 9]), blocks).save(tmp_path / "a.trace")
    return str(tmp_path / "a.trace")


def replayed(trace: str, tmp_path: Path, *options: str) -> dict[str, dict[str, object]]:
    target = tmp_path / "out.json"
    assert main(["trace", "replay", trace, *options, "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["schema"] == 1
    return {row["policy"]: row for row in content["rows"]}


def test_hits_prefix_hits_and_moves_are_counted(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 3 blocks LRU keeps 1, 2, 4 (3 left as it is a leaf); from the leaf on 3 pushes 2 out."""
    rows = replayed(trace, tmp_path, "--policies", "lru,belady", "--capacity", "3")
    assert list(rows) == ["lru", "belady"]
    assert rows["lru"] == {
        "policy": "lru",
        "capacity": 3,
        "hit_ratio": 3 / 9,
        "prefix_hit_ratio": 3 / 9,
        "moved": 6,
        "share_of_belady": 3 / 5,
    }
    assert rows["belady"]["hit_ratio"] == 5 / 9
    assert "4 requests, 9 accesses to 4 blocks" in capsys.readouterr().out


def test_every_policy_is_replayed_by_default(trace: str, tmp_path: Path) -> None:
    rows = replayed(trace, tmp_path, "--capacity", "100%")
    assert list(rows) == list(POLICIES)
    assert {row["hit_ratio"] for row in rows.values()} == {5 / 9}
    assert {row["share_of_belady"] for row in rows.values()} == {1.0}


def test_costs_of_a_trace_decide_who_leaves(tmp_path: Path) -> None:
    """Of 1 and 2 the older leaves for 3, unless it costs more to bring back."""
    ptr, blocks = np.arange(5), np.array([1, 2, 3, 1], np.uint64)
    for costs, hit_ratio in ((None, 0.0), (np.array([5.0, 1, 1, 5]), 0.25)):
        RequestTrace(ptr, blocks, costs=costs).save(tmp_path / "a.trace")
        rows = replayed(
            str(tmp_path / "a.trace"), tmp_path, "--policies", "gdsf", "--capacity", "2"
        )
        assert rows["gdsf"]["hit_ratio"] == hit_ratio


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "lru,best"], "policies='best': expected all, or of fifo, lru"),
        (["--capacity", "0"], "capacity='0': expected a share such as 5%"),
        (["--capacity", "101%"], "capacity='101%': expected a share"),
        (["--capacity", "5%,x"], "capacity='x': expected a share"),
        (["--capacity", ""], "capacity='': expected a share"),
        (["--json", "/"], "json='/'"),
    ],
)
def test_bad_options_are_refused(
    trace: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "replay", trace, *options]) == 2
    assert message in capsys.readouterr().err


def test_other_files_and_empty_traces_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["trace", "replay", str(tmp_path / ("n" * 300))]) == 2
    assert "cannot be read" in capsys.readouterr().err
    RequestTrace.of_blocks([]).save(tmp_path / "empty")
    assert main(["trace", "replay", str(tmp_path / "empty")]) == 2
    assert "expected requests for blocks, found none" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["trace", "replay", trace, "--plot", "x.png"]) == 2
    assert "tierstore[plot]" in capsys.readouterr().err


def test_a_plot_is_written(trace: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    assert main(["trace", "replay", trace, "--plot", str(tmp_path / "x.svg")]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("", "expected a name that ends in .png, .svg"),
        ("a", "expected a name that ends in .png, .svg"),
        ("a.pgf", "expected a name that ends in .png, .svg"),
        ("none/a.png", "cannot be written (No such file or directory)"),
        ("n" * 256 + ".png", "cannot be written (File name too long)"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_replay(
    target: str,
    reason: str,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A .pgf needs LaTeX, and matplotlib gives a name without an ending another one."""
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "replay", trace, "--plot", target]) == 2
    output = capsys.readouterr()
    assert f"plot={target!r}: {reason}" in output.err
    assert output.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]


@pytest.mark.parametrize("ending", FORMATS)
def test_pictures_are_drawn_in_every_format(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = str(tmp_path / f"a.{ending.upper()}")
    save_figure(new_figure(2, 1, path), path)
    assert (tmp_path / f"a.{ending.upper()}").stat().st_size > 100
