from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierstore.errors import TraceError
from tierstore.traces import file as trace_file
from tierstore.traces.file import read_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trace_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    ids = np.arange(5, dtype=np.int32)
    write_trace(path, "requests", {"block_tokens": 16}, {"ids": ids})
    facts, arrays = read_trace(path, "requests")
    assert facts == {"block_tokens": 16}
    assert list(arrays) == ["ids"]
    np.testing.assert_array_equal(arrays["ids"], ids)
    assert arrays["ids"].dtype == np.int32
    assert list(tmp_path.iterdir()) == [path]


def test_another_kind_and_a_newer_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {}, {})
    with pytest.raises(TraceError, match="trace of attention, found one of requests"):
        read_trace(path, "attention")
    monkeypatch.setattr(trace_file, "VERSION", 2)
    write_trace(path, "requests", {}, {})
    monkeypatch.undo()
    with pytest.raises(TraceError, match="version 1, found 2"):
        read_trace(path, "requests")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", b"\x93NUMPY"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="written by tierstore"):
        read_trace(path, "requests")


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, ids=np.arange(3))
    with pytest.raises(TraceError, match="written by tierstore"):
        read_trace(path, "requests")
    np.savez(path, header=np.frombuffer(b'{"format": "x"}', np.uint8))
    with pytest.raises(TraceError, match=r"another \.npz file"):
        read_trace(path, "requests")


def test_a_cut_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {}, {"ids": np.arange(1000)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError):
            read_trace(path, "requests")


def test_a_write_that_fails_leaves_the_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {"n": 1}, {})
    with pytest.raises(TraceError, match="'x': expected numbers"):
        write_trace(path, "requests", {}, {"x": np.array([{}, object()])})
    read_trace(path, "requests")
