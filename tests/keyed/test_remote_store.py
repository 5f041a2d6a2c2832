"""A keyed store in front of records that several machines share, on a real Redis server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from redis_servers import Server

from tierstore.aligned import aligned_rows
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.tiers import RedisRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

IDENTITY = Identity(model="shared")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.kill()


def machine(folder: Path, server: Server) -> KeyedStore:
    """A store of its own in a folder, with the shared tier behind it."""
    remote = RedisRecords(server.url, IDENTITY.digest, timeout=0.5)
    return KeyedStore(folder, IDENTITY, disk="4MiB", dram="1MiB", remote=remote)


def test_one_machine_serves_what_another_put(tmp_path: Path, server: Server) -> None:
    """The second time, the value comes from the machine's own memory or disk."""
    with machine(tmp_path / "a", server) as a, machine(tmp_path / "b", server) as b:
        assert a.put_many([b"x", b"y"], [b"1" * 5000, b"2"]).all()
        assert b.contains_many([b"x", b"z"]).tolist() == [True, False]
        assert b.get_many([b"z", b"y", b"x"]) == [None, b"2", b"1" * 5000]
        out = np.zeros((2, 5000), np.uint8)
        assert b.get_into([b"x", b"z"], out).tolist() == [5000, -1]
        assert out[0].tobytes() == b"1" * 5000
        assert b.stats().hits["shared"] == 2
        assert b.stats().misses == {"absent": 2}


def test_a_lease_reaches_the_shared_tier(tmp_path: Path, server: Server) -> None:
    with machine(tmp_path / "a", server) as a, machine(tmp_path / "b", server) as b:
        a.put(b"x", b"value")
        with b.lease_many([b"x", b"y"], owner="test", seconds=5) as lease:
            assert [value and bytes(value) for value in lease.values] == [b"value", None]
        b.validate()


def test_a_value_that_is_damaged_here_comes_from_the_shared_tier(
    tmp_path: Path, server: Server
) -> None:
    """The damaged bytes are in the caller's row by then, if it begins at a page."""
    value = np.random.default_rng(0).bytes(8192)
    with machine(tmp_path / "a", server) as a:
        a.put(b"x", value)
    for path in tmp_path.rglob("*.seg"):
        path.write_bytes(path.read_bytes().replace(value[100:140], bytes(40)))
    with machine(tmp_path / "a", server) as a:
        out = aligned_rows(1, 8192)
        assert a.get_into([b"x"], out).tolist() == [8192]
        assert out[0].tobytes() == value
        assert a.stats().hits["shared"] == 1


@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_a_value_that_changes_while_it_is_fetched_is_not_kept(
    tmp_path: Path, server: Server, change: str
) -> None:
    with machine(tmp_path / "a", server) as a, machine(tmp_path / "b", server) as b:
        a.put(b"x", b"old")
        remote: Any = b._remote
        changes: dict[str, Callable[[], object]] = {
            "put": lambda: b.put(b"x", b"new"),
            "delete": lambda: b.delete(b"x"),
            "clear": b.clear,
        }
        seen: list[object] = []
        assert remote is not None

        def read(keys: list[bytes], deadline: float | None = None) -> list[bytes | None]:
            found = RedisRecords.read(remote, keys, deadline)
            seen.append(changes[change]())
            remote.read = partial(RedisRecords.read, remote)
            return found

        remote.read = read
        assert b.get(b"x") == b"old"
        assert len(seen) == 1
        assert b.get(b"x") == (b"new" if change == "put" else None)


def test_what_is_removed_does_not_come_back(tmp_path: Path, server: Server) -> None:
    with machine(tmp_path / "a", server) as a, machine(tmp_path / "b", server) as b:
        a.put_many([b"x", b"y"], [b"1", b"2"])
        assert a.delete(b"x")
        assert a.get_many([b"x", b"y"]) == [None, b"2"]
        assert b.get(b"x") is None
        a.clear()
        assert a.get(b"y") is None
        assert b.get(b"y") is None


def test_without_its_server_a_machine_serves_what_it_has(tmp_path: Path, server: Server) -> None:
    with machine(tmp_path / "a", server) as a:
        a.put(b"x", b"1")
        server.kill()
        assert a.get_many([b"x", b"y"]) == [b"1", None]
        assert a.put(b"y", b"2")
        assert a.get(b"y") == b"2"
        assert a.stats().misses["shared"] == 1
        assert a.stats().refused == {"remote": 1}
