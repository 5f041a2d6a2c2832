"""What the keyed store logs: events with fields, and nothing unless it is asked for."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import FaultIO, error
from tierstore.volume.health import OFFLINE_AFTER

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.io import FileIO


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tierstore")


def open_store(path: Path, io: FileIO | None = None) -> KeyedStore:
    return KeyedStore(path / "kv", Identity(), disk="2MiB", segment="128KiB", io=io)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["event"] for record in caplog.records]


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, object]:
    (found,) = (vars(record) for record in caplog.records if vars(record)["event"] == event)
    return found


def test_the_life_of_a_store_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as store:
        store.put(b"key", b"value")
        store.clear()
        store.put(b"key", b"value")
    assert events(caplog) == ["store.opened", "store.cleared", "store.closed"]
    assert fields_of(caplog, "store.cleared")["epoch"] == 2
    closed = fields_of(caplog, "store.closed")
    assert (closed["path"], closed["records"]) == (store.volume.directory, 1)
    assert closed["dropped"] == {"cleared": 1}


def test_damage_is_logged_when_it_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        store.put_many([b"a", b"b"], [b"x" * 100, b"y" * 100])
        (path,) = {
            store.volume.files.of(place).path for place in store.volume.records.live_places()
        }
    with open(path, "r+b") as file:
        content = file.read().replace(b"x" * 100, b"z" * 100)
        file.seek(0)
        file.write(content)
        file.seek(4096 + 96 + 2)
        file.write(b"\x77")
    caplog.clear()
    with open_store(tmp_path) as store:
        store.get(b"a")
    assert events(caplog) == ["store.opened", "store.recovered", "record.dropped", "store.closed"]
    assert fields_of(caplog, "store.recovered")["dropped"] == {"damaged row": 1}
    dropped = fields_of(caplog, "record.dropped")
    assert (dropped["reason"], dropped["count"]) == ("corrupt", 1)


def test_a_failed_sync_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = FaultIO(tmp_path)
    store = open_store(tmp_path, io)
    store.put(b"key", b"value")
    caplog.clear()
    io.inject("sync", error(errno.EIO), nth=1)
    with pytest.raises(OSError, match="could not be synced"):
        store.sync()
    assert {"segment.failed", "sync.failed"} <= set(events(caplog))
    assert "injected" in str(fields_of(caplog, "sync.failed")["error"])
    store.close()


def test_a_disk_that_is_given_up_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FaultIO(tmp_path)
    store = open_store(tmp_path, io)
    store.put(b"key", b"value")
    store.sync()
    io.inject("read", error(errno.EIO))
    for _ in range(2 * OFFLINE_AFTER):
        store.get(b"key")
    assert events(caplog).count("tier.offline") == 1
    assert fields_of(caplog, "tier.offline")["errors"] == {"EIO": OFFLINE_AFTER}
    io.heal()
    store.close()


class Unplugged:
    """A remote tier whose network is gone."""

    name = "shared"

    def read(self, keys: list[bytes], deadline: float | None) -> list[bytes | None]:
        raise OSError("no route")

    def contains(self, keys: list[bytes]) -> list[bool]:
        raise OSError("no route")


def test_a_remote_tier_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote: Any = Unplugged()
    with KeyedStore(tmp_path / "kv", Identity(), disk="2MiB", remote=remote) as store:
        caplog.clear()
        assert store.get(b"key") is None
        assert not store.contains(b"key")
        assert events(caplog) == ["remote.failed"] * 2
        assert {vars(record)["tier"] for record in caplog.records} == {"shared"}


def test_a_prefetch_that_fails_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise MemoryError("none left")

    with KeyedStore(tmp_path / "kv", Identity(), disk="2MiB", dram="1MiB") as store:
        monkeypatch.setattr(store._serving, "load", load)
        assert store.prefetch([b"key"]).wait(60)
    assert fields_of(caplog, "prefetch.failed")["error"] == "MemoryError('none left')"


def test_nothing_is_printed_by_an_application_that_configures_nothing() -> None:
    program = """
import logging
from tierstore.events import emit
emit(logging.getLogger("tierstore.x"), logging.ERROR, "tier.offline", "offline")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
