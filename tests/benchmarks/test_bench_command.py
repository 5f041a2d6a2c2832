"""``tierstore bench``: what it takes, what it refuses, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from bench_schema import KEYS

from tierstore.adapters.cli import main
from tierstore.benchmarks.cli import BENCHMARKS
from tierstore.benchmarks.machine import available_memory, file_system_of

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)


def test_a_benchmark_reports_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "attention.json"
    sizes = ["--layers", "1", "--tokens", "256", "--repeat", "1"]
    assert main(["bench", "attention", *sizes, "--json", str(target)]) == 0
    output = capsys.readouterr()
    assert "speed of a step, kvdrive / full" in output.out
    assert "round 1 of 1" in output.err
    assert set(json.loads(target.read_text())) == KEYS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sorting"], "invalid choice: 'sorting'"),
        (["quality", "--layers", "2"], "--layers: means nothing to quality, only to attention"),
        (["attention", "--repeat", "0"], "repeat=0: expected a whole number from 1"),
        (["attention", "--json", "missing/file.json"], "json='missing/file.json'"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_is_added_without_loading_torch() -> None:
    program = "import sys, tierstore.benchmarks.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_machine_is_described(tmp_path: Path) -> None:
    free = available_memory()
    assert free is None or free > 0
    assert file_system_of(tmp_path / "not made yet")
