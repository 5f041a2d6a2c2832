"""The benchmark of prefix reuse on a tiny model: what it measures and reports, not how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_schema import as_json

from tierstore.benchmarks import fio, prefix
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel


def test_a_load_is_compared_with_the_prefill_and_the_disk(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def sequential_read(files: Sequence[Path], block: int, depth: int) -> float:
        read.append(len(files))
        return 1000.0

    monkeypatch.setattr(fio, "sequential_read", sequential_read)
    findings = prefix.measure(lambda _: None, tiny_model, repeat=2, tokens=600, disk=tmp_path)
    data = as_json(findings)
    assert list(data["configurations"]) == ["prefill", "load", "reuse", "disk"]
    assert list(data["measures"]["seconds"]["values"]) == ["prefill", "load", "reuse"]
    assert list(data["measures"]["bandwidth"]["values"]) == ["load", "disk"]
    assert data["settings"]["loaded tokens"] == 4 + 64 * 9
    assert len(data["ratios"]) == 3
    assert "same in 2 of 2 rounds" in data["notes"][-1]
    assert len(read) == 3
    assert not list(tmp_path.iterdir())


def test_without_fio_there_is_nothing_to_compare_the_bandwidth_with(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    findings = prefix.measure(lambda _: None, tiny_model, repeat=1, tokens=200, disk=tmp_path)
    assert "disk" not in findings.configurations
    assert len(findings.ratios) == 2
    assert any("fio is not installed" in note for note in findings.notes)


def test_a_prompt_beyond_the_window_is_refused(tiny_model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model reads at most 4,096"):
        prefix.measure(lambda _: None, tiny_model, repeat=1, tokens=5_000, disk=tmp_path)
