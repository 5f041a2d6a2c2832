from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierstore.errors import TraceError
from tierstore.traces import file as trace_file
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.file import kind_of, read_trace, write_trace
from tierstore.traces.requests import RequestTrace

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


HEADER = {"format": "tierstore-trace", "version": 1}


@pytest.mark.parametrize("version", ["true", "1.0", "0", "null", '"1"'])
def test_a_version_is_a_whole_number(tmp_path: Path, version: str) -> None:
    path = tmp_path / "a.trace"
    header = f'{{"format": "tierstore-trace", "version": {version}, "kind": "requests"}}'
    with path.open("wb") as file:
        np.savez(file, header=np.frombuffer(header.encode(), np.uint8))
    with pytest.raises(TraceError, match="expected trace version 1, found "):
        read_trace(path, "requests")


@pytest.mark.parametrize("name", ["ids", "blocks", "header"])
def test_an_entry_that_is_no_array_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {}, {} if name == "header" else {"request_ptr": np.zeros(1)})
    with zipfile.ZipFile(path) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    entries.pop(f"{name}.npy", None)
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in {**entries, name: b"abc"}.items():
            archive.writestr(each, content)
    with pytest.raises(TraceError, match=f"written by tierstore, found '{name}', which is no arra"):
        read_trace(path, "requests")


def test_half_a_pair_in_a_fact_can_be_printed(tmp_path: Path) -> None:
    """Names of files that are no UTF-8 have them in Python, and so have escapes in JSON."""
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {"a\udcff": ["b\ud800", "\ud83d\ude00", "é😀"]}, {})
    facts, _ = read_trace(path, "requests")
    assert facts == {"a?": ["b?", "😀", "é😀"]}
    assert str(facts).encode()


@pytest.mark.parametrize("fact", [object(), {1, 2}, np.int64(3)])
def test_facts_that_json_cannot_hold_are_refused(tmp_path: Path, fact: object) -> None:
    with pytest.raises(TraceError, match="facts: expected what JSON can hold, found"):
        write_trace(tmp_path / "a.trace", "requests", {"fact": fact}, {})
    assert not list(tmp_path.iterdir())


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    path = str(tmp_path / "a.trace")
    RequestTrace.of_blocks([1, 2]).save(path)
    assert RequestTrace.load(path).requests == 2
    assert kind_of(path) == "requests"


@pytest.mark.parametrize("facts", [{}, {"facts": []}, {"facts": None}, {"facts": "no"}])
def test_facts_are_a_dictionary(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = tmp_path / "a.trace"
    for trace, kind in ((RequestTrace, "requests"), (AttentionTrace, "attention")):
        header = json.dumps(HEADER | {"kind": kind} | facts).encode()
        arrays = {"request_ptr": np.zeros(1, np.int64), "blocks": np.zeros(0, np.uint64)}
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, header=np.frombuffer(header, np.uint8), **arrays)
        assert kind_of(path) == kind
        with pytest.raises(TraceError, match="expected facts by name, found"):
            trace.load(path)


@pytest.mark.parametrize("header", [b"[" * 200_000, b"[]", b"3", b"{", b"\xff", b"null"])
def test_a_header_of_another_make_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.trace"
    with path.open("wb") as file:
        np.savez(file, header=np.frombuffer(header, np.uint8))
    refused(path)


def test_a_password_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {}, {})
    data = bytearray(path.read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(magic) + flags] |= 1
    path.write_bytes(data)
    refused(path)


@pytest.mark.parametrize("shape", [(1 << 45,), (1 << 62, 8), (1 << 80,), (-1,)])
@pytest.mark.parametrize("name", ["header", "ids"])
def test_an_array_that_no_memory_holds_is_refused(
    tmp_path: Path, shape: tuple[int, ...], name: str
) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {}, {} if name == "ids" else {"ids": np.arange(3)})
    with zipfile.ZipFile(path) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape!r}}}".ljust(117) + "\n"
    entries[f"{name}.npy"] = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in entries.items():
            archive.writestr(each, content)
    with pytest.raises(TraceError, match="written by tierstore"):
        read_trace(path, "requests")
    assert kind_of(path) == (None if name == "header" else "requests")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED])
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {"n": 1}, {"ids": np.arange(20)})
    with zipfile.ZipFile(path) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for each, content in entries.items():
            archive.writestr(each, content)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        kind_of(path)
        try:
            read_trace(path, "requests")
        except TraceError:
            continue


def refused(path: Path) -> None:
    with pytest.raises(TraceError, match="written by tierstore"):
        read_trace(path, "requests")
    assert kind_of(path) is None


def test_a_write_that_fails_leaves_the_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, "requests", {"n": 1}, {})
    with pytest.raises(TraceError, match="'x': expected numbers"):
        write_trace(path, "requests", {}, {"x": np.array([{}, object()])})
    read_trace(path, "requests")
