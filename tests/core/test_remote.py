"""Tiers on real Redis servers: one, a cluster of three, and servers that fail."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from redis_servers import Server, cluster_of_three, free_port, program, running

from tierstore.errors import (
    CapacityError,
    ConfigError,
    CorruptBlockError,
    MissingExtraError,
    TierOfflineError,
)
from tierstore.layout import BlockLayout
from tierstore.testing import RecordTierTests, TierTests
from tierstore.tiers import RedisRecords, RedisTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Bytes, Ids

LAYOUT = BlockLayout.kv(2, 3, torch.float16)
BLOCK = LAYOUT.block_bytes
PART = BLOCK // 2
NAMESPACE = bytes(range(16))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    program()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[list[Server]]:
    program()
    with (
        tempfile.TemporaryDirectory(prefix="redis-") as folder,
        cluster_of_three(Path(folder)) as nodes,
    ):
        yield nodes


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may break."""
    program()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture
def empty(server: Server) -> Server:
    server.client().flushall()
    return server


class TestRedisTier(TierTests):
    @pytest.fixture(autouse=True)
    def _at(self, server: Server) -> None:
        self.url = server.url

    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> RedisTier:
        return RedisTier(layout, self.url, limit_bytes)


class TestRedisTierOnACluster(TierTests):
    # A cluster takes 30 ms to connect to, and one server serves the property as well.
    test_a_read_sees_the_last_write = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _at(self, cluster: list[Server]) -> None:
        self.url = cluster_url(cluster)

    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> RedisTier:
        return RedisTier(layout, self.url, limit_bytes)


class TestRedisRecords(RecordTierTests):
    @pytest.fixture(autouse=True)
    def _at(self, empty: Server) -> None:
        self.url = empty.url

    def make_tier(self, namespace: bytes, max_value_bytes: int) -> RedisRecords:
        return RedisRecords(self.url, namespace, max_value_bytes=max_value_bytes)


class TestRedisRecordsOnACluster(RecordTierTests):
    test_a_read_sees_what_was_written_last = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _at(self, cluster: list[Server]) -> None:
        self.url = cluster_url(cluster)

    def make_tier(self, namespace: bytes, max_value_bytes: int) -> RedisRecords:
        return RedisRecords(self.url, namespace, max_value_bytes=max_value_bytes)


def cluster_url(nodes: list[Server]) -> str:
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def numbered(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def filled(url: str, slots: int = 4, **options: object) -> tuple[RedisTier, Bytes]:
    """A tier with so many slots, and what they hold."""
    tier = RedisTier(LAYOUT, url, "1MiB", **options)  # type: ignore[arg-type]
    tier.resize(slots)
    blocks = np.random.default_rng(0).integers(0, 256, (slots, BLOCK), np.uint8)
    tier.write(numbered(slots), blocks, numbered(slots)).wait()
    return tier, blocks


def content(tier: RedisTier, *slots: int) -> Bytes:
    out: Bytes = np.zeros((len(slots), BLOCK), np.uint8)
    tier.read(ids(*slots), out, numbered(len(slots))).wait()
    return out


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The server takes connections meanwhile, but answers nothing."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


# Where and how


def test_a_tier_says_where_it_is_and_keeps_the_password(empty: Server) -> None:
    url = f"redis://someone:secret@127.0.0.1:{free_port()}"
    with pytest.raises(TierOfflineError, match="does not serve") as refused:
        RedisTier(LAYOUT, url, "1MiB")
    assert refused.value.errno == errno.ECONNREFUSED
    assert "secret" not in str(refused.value)
    tier = RedisTier(LAYOUT, empty.url, "1MiB")
    assert tier.medium == f"Redis at 127.0.0.1:{empty.port}"
    tier.close()


def test_a_server_may_be_reached_by_a_socket_file(empty: Server) -> None:
    tier, blocks = filled(f"unix://{empty.folder}/redis.sock")
    assert np.array_equal(content(tier, 0, 1, 2, 3), blocks)
    assert tier.medium == f"Redis at {empty.folder}/redis.sock"
    tier.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost", "begins with 'http': expected one of redis://"),
        ("localhost:6379", "begins with 'localhost:6379'"),
        ("redis://", "begins with 'redis'"),
        ("redis://localhost:port", "correct the URL"),
        ("redis://localhost?socket_keepalive_options=1&db=x", "correct the URL"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisTier(LAYOUT, url, "1MiB")
    with pytest.raises(ConfigError, match=message):
        RedisRecords(url, NAMESPACE)


@pytest.mark.parametrize("options", [{"ttl": 0}, {"timeout": 0}, {"connections": 0}])
def test_limits_that_are_none_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RedisRecords("redis://localhost", NAMESPACE, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(options))):
        RedisTier(LAYOUT, "redis://localhost", "1MiB", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", [b"", bytes(256)])
def test_a_namespace_is_some_bytes(namespace: bytes) -> None:
    with pytest.raises(ConfigError, match=f"a namespace of {len(namespace)} bytes"):
        RedisRecords("redis://localhost", namespace)


def test_without_the_package_the_message_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[redis\]'"):
        RedisTier(LAYOUT, "redis://localhost", "1MiB")


# Blocks


def test_slots_live_as_long_as_the_tier(empty: Server) -> None:
    tier, _ = filled(empty.url, 600)
    keys = empty.client().keys()
    assert len(keys) == 3
    assert all(empty.client().ttl(key) > 80_000 for key in keys)
    tier.resize(300)
    assert sum(map(empty.client().hlen, empty.client().keys())) == 2 * 300
    tier.close()
    assert empty.client().keys() == []


def test_a_tier_in_use_does_not_expire(empty: Server) -> None:
    now = [0.0]
    tier, _ = filled(empty.url, ttl=600, clock=lambda: now[0])
    (key,) = empty.client().keys()
    empty.client().expire(key, 50)
    now[0] = 199
    content(tier, 0)
    assert empty.client().ttl(key) <= 50
    now[0] = 200
    content(tier, 0)
    assert empty.client().ttl(key) > 500
    tier.close()


def test_blocks_of_two_tiers_are_apart(empty: Server) -> None:
    one, blocks = filled(empty.url)
    other, _ = filled(empty.url)
    other.write(ids(0), np.zeros((1, BLOCK), np.uint8), ids(0)).wait()
    other.close()
    assert np.array_equal(content(one, 0, 1, 2, 3), blocks)
    one.close()


def test_a_slot_takes_what_its_limit_says(empty: Server) -> None:
    layout = BlockLayout.kv(8, 64, torch.float16)
    tier = RedisTier(layout, empty.url, "8MiB")
    before = int(empty.client().info("memory")["used_memory"])
    tier.resize(2000)
    blocks = np.zeros((2000, layout.block_bytes), np.uint8)
    tier.write(numbered(2000), blocks, numbered(2000)).wait()
    taken = int(empty.client().info("memory")["used_memory"]) - before
    assert taken == pytest.approx(tier.used_bytes, rel=0.3)
    tier.close()


def flips(stored: bytes) -> Iterator[bytes]:
    """`stored` with each of its bits flipped in turn."""
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_every_flipped_bit_of_a_slot_is_noticed(empty: Server) -> None:
    tier, blocks = filled(empty.url)
    client = empty.client()
    (key,) = client.keys()
    stored = client.hget(key, "1.0")
    for flipped in flips(stored):
        client.hset(key, "1.0", flipped)
        with pytest.raises(CorruptBlockError, match=r"slot 1 on Redis at .* holds other bytes"):
            content(tier, 0, 1)
    assert tier.damaged == 8 * (PART + 16)
    assert np.array_equal(content(tier, 0, 2, 3), blocks[ids(0, 2, 3)])
    client.hset(key, "1.0", stored)
    assert np.array_equal(content(tier, 1), blocks[1:2])
    tier.close()


@pytest.mark.parametrize("source", ["2.0", "1.1"], ids=["slot", "part"])
def test_bytes_of_another_place_are_noticed(empty: Server, source: str) -> None:
    tier, _ = filled(empty.url)
    (key,) = empty.client().keys()
    empty.client().hset(key, "1.0", empty.client().hget(key, source))
    with pytest.raises(CorruptBlockError):
        content(tier, 1)
    tier.close()


def test_bytes_of_an_earlier_write_are_noticed(empty: Server) -> None:
    """As after a failover to a replica that lagged behind."""
    tier, _ = filled(empty.url)
    (key,) = empty.client().keys()
    earlier = empty.client().hget(key, "1.0")
    tier.write(ids(1), np.zeros((1, BLOCK), np.uint8), ids(0)).wait()
    empty.client().hset(key, "1.0", earlier)
    with pytest.raises(CorruptBlockError):
        content(tier, 1)
    tier.close()


@pytest.mark.parametrize("value", [b"", b"x", bytes(PART + 15), bytes(PART + 17)])
def test_a_value_of_another_length_is_noticed(empty: Server, value: bytes) -> None:
    tier, _ = filled(empty.url)
    (key,) = empty.client().keys()
    empty.client().hset(key, "1.0", value)
    with pytest.raises(CorruptBlockError):
        content(tier, 1)
    tier.close()


def test_a_slot_that_the_server_dropped_is_an_error(empty: Server) -> None:
    tier, blocks = filled(empty.url)
    (key,) = empty.client().keys()
    empty.client().hdel(key, "1.1")
    with pytest.raises(TierOfflineError, match=r"no longer has slot 1: .*noeviction"):
        content(tier, 1)
    assert tier.lost == 1
    out = np.zeros((1, BLOCK), np.uint8)
    tier.read(ids(1), out, ids(0), parts=["k"]).wait()
    assert np.array_equal(out[0, :PART], blocks[1, :PART])
    tier.close()


def test_a_key_of_another_kind_is_an_error(empty: Server) -> None:
    tier, _ = filled(empty.url)
    (key,) = empty.client().keys()
    empty.client().set(key, "text")
    with pytest.raises(TierOfflineError, match="refused a command: WRONGTYPE"):
        content(tier, 1)
    tier.close()


def test_a_full_server_refuses_a_write_and_serves_on(own_server: Server) -> None:
    tier, blocks = filled(own_server.url)
    own_server.client().config_set("maxmemory", "1")
    with pytest.raises(CapacityError, match=r"is out of memory .*: raise its maxmemory") as full:
        tier.write(ids(0), np.zeros((1, BLOCK), np.uint8), ids(0)).wait()
    assert isinstance(full.value, OSError), "a store gives the slots back then"
    assert full.value.errno == errno.ENOSPC
    assert np.array_equal(content(tier, 1, 2, 3), blocks[1:])
    own_server.client().config_set("maxmemory", "0")
    tier.write(ids(0), blocks, ids(0)).wait()
    assert np.array_equal(content(tier, 0, 1, 2, 3), blocks)
    tier.close()


def test_a_server_killed_in_between_is_an_error_until_it_is_back(own_server: Server) -> None:
    """(a) It dies: reads and writes fail. (b) It is back without its memory: reads say so, writes
    work. (c) What was written since can be read."""
    tier, blocks = filled(own_server.url)
    used = tier.used_bytes
    own_server.kill()
    with pytest.raises(TierOfflineError, match="does not serve"):
        content(tier, 0)
    with pytest.raises(TierOfflineError, match="does not serve"):
        tier.write(ids(0), blocks, ids(0)).wait()
    assert (tier.capacity, tier.used_bytes) == (4, used)
    assert own_server.start()
    with pytest.raises(TierOfflineError, match="no longer has slot 0"):
        content(tier, 0)
    tier.write(numbered(4), blocks, numbered(4)).wait()
    assert np.array_equal(content(tier, 0, 1, 2, 3), blocks)
    tier.close()


def test_a_tier_without_its_server_can_be_shrunk_and_closed(own_server: Server) -> None:
    tier, _ = filled(own_server.url)
    own_server.kill()
    tier.resize(2)
    assert tier.capacity == 2
    tier.close()


def test_a_server_that_hangs_is_an_error(own_server: Server) -> None:
    tier, blocks = filled(own_server.url, timeout=0.2)
    with stopped(own_server), pytest.raises(TierOfflineError, match="does not serve") as late:
        content(tier, 0)
    assert late.value.errno == errno.ETIMEDOUT
    assert np.array_equal(content(tier, 0), blocks[:1])
    tier.close()


def test_after_an_error_nothing_is_under_way(own_server: Server) -> None:
    """Batches that come after the one that failed would write into memory of the caller."""
    tier, _ = filled(own_server.url, 2000, connections=1)
    (key, *_) = sorted(own_server.client().keys())
    own_server.client().delete(key)
    out = np.zeros((2000, BLOCK), np.uint8)
    with pytest.raises(TierOfflineError):
        tier.read(numbered(2000), out, numbered(2000)).wait()
    after = out.copy()
    content(tier, 1999)
    assert np.array_equal(out, after)
    tier.close()


# Records


def stored_key(key: bytes, namespace: bytes = NAMESPACE) -> bytes:
    return b"tierstore:records:1:" + namespace.hex().encode() + b":" + key


@pytest.fixture
def records(empty: Server) -> Iterator[RedisRecords]:
    records = RedisRecords(empty.url, NAMESPACE, max_value_bytes=100)
    records.write([b"a", b"b"], [b"value of a", b"value of b"])
    yield records
    records.close()


def test_every_flipped_bit_of_a_record_is_a_miss(empty: Server, records: RedisRecords) -> None:
    client = empty.client()
    stored = client.get(stored_key(b"a"))
    for flipped in flips(stored):
        client.set(stored_key(b"a"), flipped)
        assert records.read([b"a", b"b"]) == [None, b"value of b"]
    assert records.damaged == 8 * (10 + 16)
    client.set(stored_key(b"a"), stored)
    assert records.read([b"a"]) == [b"value of a"]


@pytest.mark.parametrize(
    "planted", [b"x", bytes(15), bytes(16), bytes(26), bytes(200), bytes(1 << 20)], ids=len
)
def test_a_planted_value_is_a_miss(empty: Server, records: RedisRecords, planted: bytes) -> None:
    empty.client().set(stored_key(b"a"), planted)
    assert records.read([b"a", b"b"]) == [None, b"value of b"]
    assert records.damaged == 1
    assert records.write([b"a"], [b"again"]).all()
    assert records.read([b"a"]) == [b"again"]


def test_a_value_of_another_key_is_a_miss(empty: Server, records: RedisRecords) -> None:
    empty.client().copy(stored_key(b"a"), stored_key(b"b"), replace=True)
    assert records.read([b"a", b"b"]) == [b"value of a", None]
    assert records.damaged == 1


def test_a_value_of_another_namespace_is_a_miss(empty: Server, records: RedisRecords) -> None:
    other = bytes(16)
    empty.client().copy(stored_key(b"a"), stored_key(b"a", other))
    stranger = RedisRecords(empty.url, other)
    assert stranger.read([b"a"]) == [None]
    assert stranger.damaged == 1
    stranger.close()


def test_bytes_do_not_move_between_key_and_value(empty: Server, records: RedisRecords) -> None:
    """Key ``a`` with value ``bc`` must not pass as key ``ab`` with value ``c``."""
    records.write([b"a"], [b"bc"])
    check = (empty.client().get(stored_key(b"a")) or b"")[2:]
    empty.client().set(stored_key(b"ab"), b"c" + check)
    assert records.read([b"ab"]) == [None]


def test_a_key_of_another_kind_is_a_miss(empty: Server, records: RedisRecords) -> None:
    empty.client().delete(stored_key(b"a"))
    empty.client().lpush(stored_key(b"a"), "text")
    assert records.read([b"a", b"b"]) == [None, b"value of b"]
    assert records.damaged == 1


def test_records_expire_if_asked_to(empty: Server, records: RedisRecords) -> None:
    brief = RedisRecords(empty.url, NAMESPACE, ttl=1000)
    brief.write([b"brief"], [b"1"])
    assert 990 <= empty.client().ttl(stored_key(b"brief")) <= 1000
    assert empty.client().ttl(stored_key(b"a")) == -1
    brief.close()


def test_a_full_server_refuses_records_and_serves_on(own_server: Server) -> None:
    records = RedisRecords(own_server.url, NAMESPACE)
    records.write([b"a"], [b"1"])
    own_server.client().config_set("maxmemory", "1")
    assert records.write([b"a", b"b"], [b"2", b"3"]).tolist() == [False, False]
    assert records.refused == 2
    assert records.read([b"a", b"b"]) == [b"1", None]
    records.close()


def test_a_server_may_come_later_go_and_come_back(own_server: Server) -> None:
    own_server.kill()
    records = RedisRecords(own_server.url, NAMESPACE)
    with pytest.raises(TierOfflineError, match="does not serve") as refused:
        records.read([b"a"])
    assert refused.value.errno == errno.ECONNREFUSED
    for value in (b"1", b"2"):
        assert own_server.start()
        assert records.read([b"a"]) == [None]
        assert records.write([b"a"], [value]).all()
        assert records.read([b"a"]) == [value]
        own_server.kill()
        for call in (records.read, records.contains, records.remove):
            with pytest.raises(TierOfflineError, match="does not serve"):
                call([b"a"])
        with pytest.raises(TierOfflineError, match="does not serve"):
            records.write([b"a"], [b"3"])
    records.close()


def test_a_connection_that_went_is_made_again(empty: Server, records: RedisRecords) -> None:
    assert empty.client().client_kill_filter(_type="normal", skipme=True) >= 1
    assert records.read([b"a"]) == [b"value of a"]


@pytest.mark.parametrize("call", ["read", "contains"])
def test_a_deadline_holds_when_the_server_hangs(own_server: Server, call: str) -> None:
    """Without it the call would wait for the timeout, which is far away."""
    records = RedisRecords(own_server.url, NAMESPACE, timeout=200)
    records.write([b"a"], [b"1"])
    with stopped(own_server), pytest.raises(TierOfflineError, match=r"within 0\.05 s") as late:
        getattr(records, call)([b"a"], deadline=0.05)
    assert late.value.errno == errno.ETIMEDOUT
    assert records.read([b"a"]) == [b"1"]
    records.close()


def test_a_server_that_hangs_is_an_error_without_a_deadline(own_server: Server) -> None:
    records = RedisRecords(own_server.url, NAMESPACE, timeout=0.2)
    records.write([b"a"], [b"1"])
    with stopped(own_server):
        for call in (records.read, records.contains, records.remove):
            with pytest.raises(TierOfflineError, match="does not serve"):
                call([b"a"])
    records.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), "read only replica"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), "NOREPLICAS"),
        (("ACL", "SETUSER", "default", "-set"), "no permissions"),
    ],
)
def test_a_server_that_refuses_writes_is_an_error(
    own_server: Server, setting: tuple[str, ...], message: str
) -> None:
    records = RedisRecords(own_server.url, NAMESPACE)
    records.write([b"a"], [b"1"])
    own_server.client().execute_command(*setting)
    with pytest.raises(TierOfflineError, match=message):
        records.write([b"a"], [b"2"])
    assert records.read([b"a"]) == [b"1"]
    records.close()


class Impostor:
    """Answers `reply` to every command but those that make a connection, and hangs up at first."""

    def __init__(self, reply: bytes, hang_ups: int = 0) -> None:
        self._reply, self._hang_ups = reply, hang_ups
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}?protocol=2"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                while received := connection.recv(1 << 16):
                    greetings = received.upper().count(b"CLIENT\r\n")
                    if not greetings and self._hang_ups:
                        self._hang_ups -= 1
                        break
                    connection.sendall(b"+OK\r\n" * greetings or self._reply)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-ERR something else\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
    ],
    ids=["loading", "masterdown", "noauth", "error", "not redis", "silence"],
)
def test_whatever_a_server_says_is_an_error_of_the_tier(reply: bytes) -> None:
    pytest.importorskip("redis")
    impostor = Impostor(reply)
    records = RedisRecords(impostor.url, NAMESPACE, timeout=0.2)
    with pytest.raises(TierOfflineError):
        records.read([b"a"])
    with pytest.raises(TierOfflineError):
        records.write([b"a"], [b"1"])
    with pytest.raises(TierOfflineError):
        RedisTier(LAYOUT, impostor.url, "1MiB", timeout=0.2)
    records.close()
    impostor.close()


@pytest.mark.parametrize(("hang_ups", "is_served"), [(1, True), (2, False)])
def test_a_command_that_was_cut_off_is_sent_once_more(hang_ups: int, *, is_served: bool) -> None:
    pytest.importorskip("redis")
    impostor = Impostor(b"$0\r\n\r\n", hang_ups)
    records = RedisRecords(impostor.url, NAMESPACE, timeout=5)
    with nullcontext() if is_served else pytest.raises(TierOfflineError):
        assert records.read([b"a"]) == [None]
    records.close()
    impostor.close()


# A cluster


def test_records_are_spread_over_a_cluster(cluster: list[Server]) -> None:
    records = RedisRecords(cluster_url(cluster), NAMESPACE)
    keys = [b"%d" % i for i in range(100)]
    before = [node.client().dbsize() for node in cluster]
    records.write(keys, keys)
    grown = [node.client().dbsize() - old for node, old in zip(cluster, before, strict=True)]
    assert sum(grown) == 100
    assert min(grown) >= 10
    assert records.medium == f"Redis cluster at 127.0.0.1:{cluster[0].port}"
    records.remove(keys)
    records.close()


def test_a_node_that_hangs_is_an_error_for_its_keys_only(cluster: list[Server]) -> None:
    records = RedisRecords(cluster_url(cluster), NAMESPACE, timeout=0.3)
    keys = [b"%d" % i for i in range(30)]
    records.write(keys, keys)
    held = cluster[2].client().keys()
    at_last = [key for key in keys if stored_key(key) in held]
    elsewhere = [key for key in keys if stored_key(key) not in held]
    assert min(len(at_last), len(elsewhere)) > 0
    with stopped(cluster[2]):
        assert records.read(elsewhere) == elsewhere
        with pytest.raises(TierOfflineError):
            records.read(at_last)
    assert records.read(keys) == keys
    records.close()


def test_without_a_cluster_the_error_says_so(server: Server) -> None:
    records = RedisRecords(f"redis+cluster://127.0.0.1:{server.port}", NAMESPACE)
    with pytest.raises(TierOfflineError, match=r"Redis cluster at .* does not serve"):
        records.read([b"a"])
    records.close()


def test_descriptors_are_given_back(empty: Server) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        tier, _ = filled(empty.url)
        tier.close()
        records = RedisRecords(empty.url, NAMESPACE)
        records.read([b"a"])
        records.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
