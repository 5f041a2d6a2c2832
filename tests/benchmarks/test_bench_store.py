"""The store benchmark at tiny sizes: what it measures, and that wrong bytes end it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from bench_schema import as_json

from tierstore.benchmarks import fio, store
from tierstore.benchmarks.contender import Contender, Room, Rows, is_filling
from tierstore.benchmarks.keyed import Keyed, full_segments, metadata_bytes
from tierstore.benchmarks.peers import PEERS, Files, is_installed
from tierstore.benchmarks.rounds import Measure
from tierstore.benchmarks.workload import Plan, against_best, check_reads, label
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tierstore.benchmarks.contender import Get, Look

KIB = 1 << 10
PLAN = Plan(
    blocks=(4 * KIB, 64 * KIB),
    warm_bytes=1 << 20,
    read_bytes=1 << 20,
    put_bytes=1 << 20,
    synced_bytes=1 << 18,
    cold_bytes=1 << 22,
    cold_read_bytes=1 << 20,
    most_calls=256,
    most_syncs=1,
    records=500,
)
STORES: tuple[type[Contender], ...] = (Keyed, *PEERS)
ALL = tuple(
    pytest.param(
        each,
        id=each.name,
        marks=pytest.mark.skipif(not is_installed(each), reason=f"no package {each.package}"),
    )
    for each in STORES
)


@pytest.fixture(autouse=True)
def without_waiting_for_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.sync` writes what the whole machine has not written yet."""
    monkeypatch.setattr(os, "sync", lambda: None)


def read(form: str, get: Get, keys: Sequence[bytes], size: int) -> list[bytes]:
    """What a form of reading gives."""
    rows, seen = Rows.of(len(keys), size), list[bytes]()

    def look(values: Sequence[bytes | memoryview | None]) -> None:
        seen.extend(bytes(value or b"") for value in values)

    get(keys, rows, look)
    return [row.tobytes() for row in rows.array] if is_filling(form) else seen


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("contender", ALL)
def test_every_form_of_every_store_gives_what_was_put(
    contender: type[Contender], is_durable: bool, tmp_path: Path
) -> None:
    size = 40 * KIB
    room = Room(tmp_path / "store", 100 * size, memory=100 * size, is_durable=is_durable)
    expected: dict[bytes, bytes] = {}
    with closing(contender(room)) as opened:
        for put in opened.puts().values():
            new = {os.urandom(32): os.urandom(size) for _ in range(5)}
            put(list(new), list(new.values()))
            expected |= new
        opened.settle()
    with closing(contender(room)) as opened:
        keys, values = list(expected)[::-1], list(expected.values())[::-1]
        forms = opened.gets()
        assert "" in forms
        for form, get in forms.items():
            assert read(form, get, keys, size) == values, form


def test_measures_everything_in_the_same_rounds(tmp_path: Path) -> None:
    said: list[str] = []
    findings = store.measure(said.append, PLAN, repeat=1, disk=tmp_path)
    data = as_json(findings)

    units = {name: measure["unit"] for name, measure in data["measures"].items()}
    for block in ("4 KiB", "64 KiB"):
        assert units[f"get {block}"] == "MB/s; warm"
        assert "survives SIGKILL" in units[f"put {block}"]
        assert "survives power loss" in units[f"put {block}, synced"]
    assert units["get 64 KiB, cold"] == "MB/s; cold, random"
    everything = {name for measure in data["measures"].values() for name in measure["values"]}
    assert everything <= set(data["configurations"])
    for contender in PEERS:
        measured = contender.name in {name.split()[0] for name in everything}
        assert measured is is_installed(contender)
        assert measured is (data["configurations"][contender.name] != "not installed")
    assert any(line.startswith("put 64 KiB, synced: round 1 of 1: ") for line in said)
    assert data["details"]["get 64 KiB"]["tierstore"]["records"] == 16
    assert not list(tmp_path.iterdir())

    targets = {
        ratio["says"].partition(":")[0]: ratio["at_least"] or ratio["at_most"]
        for ratio in data["ratios"]
        if ratio["is_met"] is not None
    }
    assert targets["get 4 KiB into a buffer"] == 1.0
    assert targets["get 64 KiB into a buffer"] == 1.0
    assert targets["get 64 KiB as a view, against a copy"] == 1.5
    assert targets["put 4 KiB"] == targets["put 64 KiB, synced"] == 1.0
    assert targets["open 500 records"] == targets["metadata of a record"] == 1.0
    assert targets.get("get 64 KiB, cold", 0.9) == 0.9


def test_parts_can_be_chosen(tmp_path: Path) -> None:
    findings = store.measure(lambda _: None, PLAN, repeat=1, disk=tmp_path, parts="cold")
    assert next(iter(findings.measures)) == "get 64 KiB, cold"
    with pytest.raises(ConfigError, match="parts='cold,hot': expected some of get, put"):
        store.measure(lambda _: None, PLAN, repeat=1, disk=tmp_path, parts="cold,hot")


def test_too_small_a_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    huge = replace(PLAN, records=10**12)
    with pytest.raises(CapacityError, match="name another directory with --disk"):
        store.measure(lambda _: None, huge, repeat=1, disk=tmp_path)
    assert not list(tmp_path.iterdir())


class Forgetful(Files):
    """A store whose values lose their last byte."""

    name = "forgetful"

    def gets(self) -> Mapping[str, Get]:
        return {"": self._get_most}

    def _get_most(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        self._get(keys, rows, look)
        rows.array[len(keys) - 1, -1] ^= 1


@pytest.mark.parametrize("parts", ["get", "put", "cold"])
def test_a_value_that_comes_back_wrong_ends_the_benchmark(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PEERS", (Forgetful,))
    with pytest.raises(CorruptBlockError, match=r"forgetful: 1 of .* not what was put"):
        store.measure(lambda _: None, PLAN, repeat=1, disk=tmp_path, parts=parts)


def test_views_and_new_bytes_are_checked_too() -> None:
    rows = Rows.of(2, 4)
    with pytest.raises(CorruptBlockError, match="store view: 1 of 2"):
        check_reads(
            "store view",
            lambda keys, rows, look: look([memoryview(b"good"), b"evil"]),
            [b"a", b"b"],
            [b"good", b"fine"],
            rows,
        )


def test_a_peer_that_is_not_installed_is_shown_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "package", "no_such_package_anywhere")
    data = as_json(store.measure(lambda _: None, PLAN, repeat=1, disk=tmp_path, parts="cold"))
    assert data["configurations"]["files"] == "not installed"
    assert "files" not in data["measures"]["get 64 KiB, cold"]["values"]


def test_the_best_form_of_each_side_is_the_one_with_the_greatest_median() -> None:
    rates = {"own": [1.0, 9.0, 1.0], "own batch": [2.0, 2.0, 2.0], "a": [4.0, 4.0, 4.0]}
    measures = {"get": Measure("MB/s", rates)}
    (ratio,) = against_best("get", measures, "get", ["own", "own batch"], ["a"], at_least=1.0)
    assert (ratio.numerator, ratio.denominator) == ("own batch", "a")
    assert ratio.says == "get: own batch / a"
    assert against_best("get", measures, "get", ["own"], []) == []


def test_full_segments_and_the_rest_are_told_apart(tmp_path: Path) -> None:
    with closing(Keyed(Room(tmp_path / "store", 2 << 20))) as opened:
        empty = metadata_bytes(tmp_path)
        assert full_segments(tmp_path) == []
        keys = [os.urandom(32) for _ in range(300)]
        opened.puts()[" batch"](keys, [bytes(4 * KIB)] * len(keys))
    full = full_segments(tmp_path)
    assert full
    assert all(path.suffix == ".seg" for path in full)
    assert empty < metadata_bytes(tmp_path) < sum(path.stat().st_size for path in full)


def test_fio_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(fio.FioError, match=r"fio(: | is not installed)"):
        fio.random_read([tmp_path / "missing"], 4 * KIB, 4 * KIB, 1, seed=0)
    with pytest.raises(fio.FioError, match=r"fio is not installed|no file to read"):
        fio.random_read([], 4 * KIB, 4 * KIB, 1, seed=0)


@pytest.mark.parametrize(
    ("size", "name"), [(512, "0.5 KiB"), (4096, "4 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB")]
)
def test_sizes_are_named(size: int, name: str) -> None:
    assert label(size) == name
