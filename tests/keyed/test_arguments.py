"""Family E of the fault cases: bad arguments, configuration, foreign data.

E4 for each codec on its own is in tests/core/test_codecs.py.
"""

# ruff: noqa: ANN401 (arguments that are wrong are of any type)

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed_stores import (
    IDENTITY,
    KEYS,
    SEGMENT,
    VALUES,
    content,
    filled,
    in_child,
    open_store,
    segment_files,
)

import tierstore
from tierstore.admission import AdmitAfter, EnduranceBudget
from tierstore.codecs import Int4Codec, Int8Codec, ShuffleZstdCodec
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError, StoreMismatchError
from tierstore.identity import Facts, Identity
from tierstore.io import FileIO
from tierstore.keyed import KeyedStore
from tierstore.layout import BlockLayout, Part
from tierstore.testing.clock import FakeClock
from tierstore.volume.format import (
    LIVE,
    ROW,
    ROW_BYTES,
    Header,
    extent_size,
    place_binding,
    row_check,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Codec

BF16 = torch.bfloat16
KV = BlockLayout.kv(8, 64, BF16)
EDGES = [1, 2, 39, 40, 41, 47, 48, 49, 50, 255, 256, 510, 511]


def shown(value: object) -> str:
    """`value` as text without its place in memory: tests have the same names in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyedStore]:
    with open_store(tmp_path / "s", dram="128KiB") as store:
        yield store
        if not store.is_closed:
            store.validate()


class TestKeys:
    @pytest.mark.parametrize("byte", [0, 0xFF, ord("k")])
    def test_keys_of_every_length_are_apart(self, tmp_path: Path, byte: int) -> None:
        """E1. NUL and 0xFF too, and keys that are others with a byte added or changed."""
        keys = [bytes([byte]) * length for length in EDGES]
        keys += [key[:-1] + b"x" for key in keys] + [b"x" + key[:-1] for key in keys]
        keys = list(dict.fromkeys(keys))
        values = [b"%d" % i for i in range(len(keys))]
        with open_store(tmp_path / "s") as store:
            assert store.put_many(keys, values).all()
            assert store.get_many(keys) == values
            assert sorted(store) == sorted(keys)
        with open_store(tmp_path / "s") as store:
            assert store.get_many(keys) == values
            assert store.delete_many(keys[::2]).all()
            assert store.get_many(keys[1::2]) == values[1::2]

    @pytest.mark.parametrize("length", [0, 512, 100_000])
    def test_a_key_of_another_length_is_refused_everywhere(
        self, store: KeyedStore, length: int
    ) -> None:
        """E1."""
        key, out = bytes(length), np.zeros((2, 9), np.uint8)
        store.put(b"a", b"1")
        message = f"key of {length} bytes: expected 1 to 511; hash longer ones"
        for call in (
            lambda: store.put_many([b"b", key], [b"1", b"2"]),
            lambda: store.get_many([b"a", key]),
            lambda: store.get_into([b"a", key], out),
            lambda: store.contains_many([b"a", key]),
            lambda: store.touch_many([b"a", key]),
            lambda: store.delete_many([b"a", key]),
            lambda: store.lease_many([b"a", key], owner="test", seconds=1),
            lambda: store.prefetch([b"a", key]),
        ):
            with pytest.raises(ConfigError, match=message):
                call()
        assert list(store) == [b"a"]
        assert store.stats().leases == 0

    @pytest.mark.parametrize("key", ["text", 7, None, 1.5, ["a"]], ids=shown)
    def test_a_key_that_is_not_bytes_is_refused(self, store: KeyedStore, key: Any) -> None:
        """E1."""
        with pytest.raises(ConfigError, match="expected bytes, found"):
            store.put(key, b"1")
        with pytest.raises(ConfigError, match="expected bytes, found"):
            store.get_many([b"a", key])
        assert len(store) == 0

    def test_anything_with_the_bytes_of_a_key_is_that_key(self, store: KeyedStore) -> None:
        """E1."""
        assert store.put(bytearray(b"key"), b"1")  # type: ignore[arg-type]
        assert store.get(memoryview(b"key")) == b"1"  # type: ignore[arg-type]
        keys = np.frombuffer(b"keykez", np.uint8).reshape(2, 3)
        assert store.get_many(keys) == [b"1", None]

    @pytest.mark.parametrize(
        "keys", [(key for key in [b"a"]), {b"a"}, {b"a": 1}.keys(), b"abc", 7, None], ids=shown
    )
    def test_keys_that_can_be_read_only_once_or_have_no_order_are_refused(
        self, store: KeyedStore, keys: Any
    ) -> None:
        """E1."""
        with pytest.raises(ConfigError, match=r"expected (a sequence of|bytes)"):
            store.get_many(keys)

    @pytest.mark.parametrize(
        "keys",
        [np.zeros((2, 49), np.uint8), np.zeros((2, 0), np.uint8), np.zeros(3, np.uint8),
         np.zeros((2, 8), np.int8), np.zeros((1, 2, 3), np.uint8)],
        ids=lambda keys: f"{keys.dtype} {keys.shape}",
    )  # fmt: skip
    def test_an_array_of_keys_of_another_shape_is_refused(
        self, store: KeyedStore, keys: Any
    ) -> None:
        """E1, E3."""
        with pytest.raises(ConfigError, match=r"keys are an array .*: expected uint8 \[n, 1"):
            store.get_many(keys)


class TestValues:
    def test_values_at_the_edge_of_every_size_class_come_back(self, tmp_path: Path) -> None:
        """E2."""
        sizes = [0, 1]
        page = 4096
        for pages in range(1, 48):
            if extent_size(pages * page) != extent_size(pages * page + 1):
                sizes += [pages * page - 1, pages * page, pages * page + 1]
        with open_store(tmp_path / "s", disk="32MiB", segment="1MiB") as store:
            keys = [b"%d" % size for size in sizes]
            values = [content(size, size) for size in sizes]
            assert store.put_many(keys, values).all()
            assert store.get_many(keys) == values
            store.validate()
        with open_store(tmp_path / "s", disk="32MiB", segment="1MiB") as store:
            assert store.get_many(keys) == values

    def test_a_value_that_fits_nowhere_is_refused_and_evicts_nothing(self, tmp_path: Path) -> None:
        """E2."""
        with filled(tmp_path / "s") as store:
            for size in (SEGMENT, SEGMENT - 8192 + 1, 1 << 22):
                assert not store.put(b"large", bytes(size))
            assert store.stats().refused == {"too large": 3}
            assert store.stats().dropped == {}
            assert store.get_many(KEYS) == VALUES
            largest = store.volume.largest
            assert store.put_many([b"a", b"large"], [bytes(largest), bytes(1 << 22)]).tolist() == [
                True, False,
            ]  # fmt: skip
            assert store.get(b"a") == bytes(largest)

    def test_a_value_that_only_fits_when_it_is_coded_is_refused_too(self, tmp_path: Path) -> None:
        """E2, E12. Lengths on disk are bounded by the size of a file, whatever the codec."""
        with open_store(tmp_path / "s", codec=ShuffleZstdCodec()) as store:
            assert not store.put(b"large", bytes(1 << 20))
            assert store.put(b"small", bytes(SEGMENT - 8192))
            assert store.get(b"small") == bytes(SEGMENT - 8192)

    def test_a_value_larger_than_memory_allows_is_served_from_disk(self, tmp_path: Path) -> None:
        """E2."""
        with open_store(tmp_path / "s", disk="16MiB", segment="4MiB", dram="128KiB") as store:
            large = content(0, 3 << 20)
            assert store.put(b"a", large)
            for _ in range(2):
                assert store.get(b"a") == large
                with store.lease(b"a", owner="test", seconds=9) as lease:
                    assert bytes(lease.values[0] or b"") == large
            assert store.stats().hits["disk"] == 4

    @pytest.mark.parametrize(
        "value",
        [
            np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(5, dtype=np.uint64),
            np.zeros(0, np.uint8), np.array(7.0), np.array([True, False]), memoryview(b"abcd")[1:3],
            bytearray(b"xyz"), np.array([1, 2], ">f4"),
            np.array([1, math.nan, math.inf, 6e-8], np.float16),
        ],
        ids=lambda value: f"{type(value).__name__} {getattr(value, 'shape', '')}",
    )  # fmt: skip
    def test_contiguous_buffers_of_any_type_are_their_bytes(
        self, store: KeyedStore, value: Any
    ) -> None:
        """E3, E4."""
        assert store.put(b"a", value)
        assert store.get(b"a") == bytes(memoryview(value).tobytes())

    @pytest.mark.parametrize(
        "value",
        [
            np.zeros((4, 6))[:, ::2], np.zeros((4, 6), order="F"), memoryview(b"abcd")[::2],
            np.zeros(3, "datetime64[s]"), np.array([object()]), "text", 7, None,
        ],
        ids=shown,
    )  # fmt: skip
    def test_other_values_are_refused_and_nothing_of_their_batch_is_stored(
        self, store: KeyedStore, value: Any
    ) -> None:
        """E3."""
        with pytest.raises(ConfigError, match="expected contiguous bytes-like objects"):
            store.put_many([b"a", b"b"], [b"1", value])
        assert len(store) == 0

    @pytest.mark.parametrize(
        "out",
        [
            np.zeros((2, 99), np.int8), np.zeros((1, 99), np.uint8), np.zeros(99, np.uint8),
            np.frombuffer(bytes(198), np.uint8).reshape(2, 99), [bytearray(99)] * 2, None,
        ],
        ids=lambda out: f"{type(out).__name__} {getattr(out, 'shape', '')}",
    )  # fmt: skip
    def test_a_place_for_values_of_another_kind_is_refused(
        self, store: KeyedStore, out: Any
    ) -> None:
        """E3."""
        store.put_many([b"a", b"b"], [b"1", b"2"])
        with pytest.raises(ConfigError, match=r"^out is "):
            store.get_into([b"a", b"b"], out)

    @pytest.mark.parametrize("is_cached", [False, True])
    def test_a_place_that_is_too_narrow_is_refused_and_left_alone(
        self, store: KeyedStore, is_cached: bool
    ) -> None:
        """E3."""
        store.put_many([b"a", b"b"], [b"1", bytes(100)])
        if is_cached:
            store.get_many([b"a", b"b"])
        out = np.full((2, 99), 7, np.uint8)
        with pytest.raises(ConfigError, match="rows of 99 bytes: expected at least 100"):
            store.get_into([b"a", b"b"], out)
        assert (out == 7).all()
        assert not store.volume.records.pins.any()
        wide = np.full((4, 300), 7, np.uint8)[::2, ::2]
        assert store.get_into([b"a", b"b"], wide).tolist() == [1, 100]
        assert wide[1, :100].tobytes() == bytes(100)

    @pytest.mark.parametrize("codec", [None, ShuffleZstdCodec(2), ShuffleZstdCodec(4)], ids=shown)
    def test_numbers_of_every_kind_come_back_byte_for_byte(
        self, tmp_path: Path, codec: Any
    ) -> None:
        """E4."""
        random = np.random.default_rng(0)
        payloads: list[Any] = [
            np.full(999, math.nan, np.float32), np.full(999, -math.inf), np.full(999, 5e-324),
            np.zeros(999), random.standard_normal(999).astype(np.float16), random.bytes(4000),
            np.array([0x7FC0DEAD, 0xFFC00001] * 300, np.uint32), np.tile(np.arange(256), 9),
        ]  # fmt: skip
        values = [bytes(memoryview(payload)) for payload in payloads]
        keys = [b"%d" % i for i in range(len(values))]
        with open_store(tmp_path / "s", codec=codec) as store:
            assert store.put_many(keys, payloads).all()
            assert store.get_many(keys) == values
        with open_store(tmp_path / "s", codec=codec) as store:
            assert store.get_many(keys) == values

    @settings(max_examples=100)
    @given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=12))
    def test_each_position_of_a_batch_is_answered_by_the_last_value_of_its_key(
        self, pairs: list[tuple[int, int]]
    ) -> None:
        """E2. Also where that one was refused."""
        keys = [b"%d" % key for key, _ in pairs]
        values = [bytes(1 << 20) if size == 5 else b"v" * size for _, size in pairs]
        last = dict(zip(keys, values, strict=True))
        with TemporaryDirectory() as folder, open_store(Path(folder) / "s") as store:
            done = store.put_many(keys, values).tolist()
            assert done == [len(last[key]) < 1 << 20 for key in keys]
            assert store.get_many(keys) == [
                last[key] if is_done else None for key, is_done in zip(keys, done, strict=True)
            ]


WRONG_OPTIONS: dict[str, list[Any]] = {
    "disk": [0, -1, math.nan, 1.5, True, None, "", "many", "-1MiB", 4096],
    "dram": [0, -1, math.nan, True, "x", 1, 4096],
    "segment": [0, -4096, 5000, 4096, 12288, "x"],
    "threads": [-1, 1.5, "4", None],
    "codec": [7, "zstd", ShuffleZstdCodec],
    "admission": [7, "all", AdmitAfter],
    "verify": ["never", None],
    "recovery": ["loud", None],
}
"""Values that are refused, by option."""


class TestConfiguration:
    @pytest.mark.parametrize(
        ("option", "value"),
        [(option, value) for option, values in WRONG_OPTIONS.items() for value in values
         if not (option in ("dram", "codec", "admission") and value is None)],
        ids=shown,
    )  # fmt: skip
    def test_a_wrong_option_is_named_and_nothing_is_made(
        self, tmp_path: Path, option: str, value: Any
    ) -> None:
        """E5."""
        with pytest.raises(ConfigError) as raised:
            open_store(tmp_path / "s", **{option: value})
        assert f"{option}=" in str(raised.value)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("identity", [None, "model", {"model": "x"}], ids=shown)
    def test_an_identity_must_be_one(self, tmp_path: Path, identity: Any) -> None:
        """E5."""
        with pytest.raises(ConfigError, match=r"identity=.*: expected a tierstore\.identity\.Iden"):
            KeyedStore(tmp_path / "s", identity, disk="1MiB")
        with pytest.raises(ConfigError, match=r"model=7 of an identity"):
            Identity(model=7)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"block=\(1\.5,\) of an identity"):
            Identity(block=(1.5,))  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("deadline", [-1, math.nan, math.inf, 1e300, "1", b"1"], ids=shown)
    def test_a_deadline_that_is_none_is_refused(self, tmp_path: Path, deadline: Any) -> None:
        """E5."""
        with filled(tmp_path / "s") as store:
            out = np.zeros((8, 5000), np.uint8)
            for call in (
                lambda: store.get_many(KEYS, deadline=deadline),
                lambda: store.get_into(KEYS, out, deadline=deadline),
                lambda: store.put_many(KEYS, VALUES, deadline=deadline),
                lambda: store.lease_many(KEYS, owner="test", seconds=1, deadline=deadline),
                lambda: store.sync(deadline=deadline),
                lambda: store.close(deadline=deadline),
            ):
                with pytest.raises(ConfigError, match=r"^deadline=.*: expected seconds from now"):
                    call()
            assert store.get_many(KEYS) == VALUES

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, "1", None], ids=shown)
    def test_a_lease_without_a_time_is_refused(self, store: KeyedStore, seconds: Any) -> None:
        """E5."""
        store.put(b"a", b"1")
        with pytest.raises(ConfigError, match=r"^seconds=.* of a lease: expected more than 0"):
            store.lease(b"a", owner="test", seconds=seconds)
        assert store.stats().leases == 0

    def test_a_batch_needs_a_value_for_each_key(self, store: KeyedStore) -> None:
        """E5."""
        with pytest.raises(ConfigError, match="3 keys and 2 values: expected one for each"):
            store.put_many([b"a", b"b", b"c"], [b"1", b"2"])
        assert len(store) == 0


class TestIdentity:
    @pytest.mark.parametrize(
        "other",
        [
            Identity(model="other"), Identity(model="test", weights="w"),
            Identity(model="test", dtype="f2"), Identity(model="test", layout="l"),
            Identity(model="test", block=(16,)), Identity(model="test", tenant="t"),
        ],
        ids=lambda identity: identity.folder,
    )  # fmt: skip
    def test_values_of_another_identity_are_never_seen(
        self, tmp_path: Path, other: Identity
    ) -> None:
        """E6."""
        filled(tmp_path / "s").close()
        with KeyedStore(tmp_path / "s", other, disk="512KiB", segment=SEGMENT) as store:
            assert store.get_many(KEYS) == [None] * 8
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES

    def test_a_namespace_under_a_wrong_name_is_refused(self, tmp_path: Path) -> None:
        """E6. Somebody has renamed a directory."""
        other = Identity(model="other", dtype="float16")
        filled(tmp_path / "s").close()
        (tmp_path / "s" / IDENTITY.folder).rename(tmp_path / "s" / other.folder)
        before = everything(tmp_path)
        with pytest.raises(StoreMismatchError, match="model is 'test', expected 'other'") as raised:
            KeyedStore(tmp_path / "s", other, disk="512KiB", segment=SEGMENT)
        assert "dtype is '', expected 'float16'" in str(raised.value)
        assert changed(before, everything(tmp_path)) == set()

    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            (Int4Codec(KV, 64), "int4/32;"), (Int4Codec(BlockLayout.kv(16, 32, BF16)), "(8, 64)"),
            (Int4Codec(BlockLayout.kv(8, 64, torch.float16)), "bfloat16"), (Int8Codec(KV), "int4"),
        ],
        ids=["value group", "shape", "type", "bits"],
    )  # fmt: skip
    def test_a_codec_with_other_parameters_is_another_identity(
        self, tmp_path: Path, other: Codec, difference: str
    ) -> None:
        """E6. Blocks of one size, coded bytes of one length: another layout would read nonsense."""
        value = content(3, KV.block_bytes)
        options: dict[str, Any] = {"disk": "512KiB", "segment": SEGMENT}
        with KeyedStore(tmp_path / "s", IDENTITY, codec=Int4Codec(KV), **options) as store:
            folder = Path(store.volume.directory)
            assert store.put(b"a", value)
        with KeyedStore(tmp_path / "s", IDENTITY, codec=other, **options) as store:
            assert store.get(b"a") is None
            found, expected = store.volume.directory, store.identity.codec
        shutil.rmtree(found)
        folder.rename(found)
        with pytest.raises(StoreMismatchError) as raised:
            KeyedStore(tmp_path / "s", IDENTITY, codec=other, **options)
        assert difference in str(raised.value)
        assert f"expected {expected!r}" in str(raised.value)

    def test_a_long_signature_is_cut_and_still_tells_layouts_apart(self) -> None:
        """E6."""
        shared = tuple(Part(chr(97 + i) * 20, (8, 4), BF16) for i in range(11))
        one, two = (BlockLayout((*shared, Part("last", (8, n), BF16))) for n in (4, 8))
        assert len(one.signature) == len(Int8Codec(one).signature) == 255
        assert one.signature[:222] == two.signature[:222]
        assert one.signature != two.signature
        assert Int8Codec(one).signature != Int8Codec(two).signature

    def test_files_of_another_store_are_refused(self, tmp_path: Path) -> None:
        """E6."""
        with filled(tmp_path / "s") as store:
            segment = Path(segment_files(store)[0])
        foreign = Identity(model="foreign")
        KeyedStore(tmp_path / "t", foreign, disk="512KiB", segment=SEGMENT).close()
        (other,) = (tmp_path / "t").rglob("00000000.seg")
        with KeyedStore(tmp_path / "t", foreign, disk="512KiB") as store:
            store.put(b"a", b"1")
            other = Path(store.volume.files.of(int(store.volume.records.live_places()[0])).path)
        segment.write_bytes(other.read_bytes())
        with pytest.raises(StoreMismatchError, match="belongs to another store"):
            open_store(tmp_path / "s")
        assert segment.read_bytes() == other.read_bytes()

    @pytest.mark.parametrize("version", [0, 2, 99])
    def test_another_version_of_the_format_is_refused_untouched(
        self, tmp_path: Path, version: int
    ) -> None:
        """E6."""
        with filled(tmp_path / "s") as store:
            file = Path(store.volume.directory) / "IDENTITY"
        known = json.loads(file.read_bytes().split(b"\n")[0])
        known["version"], known["new field"] = version, {"any": "thing"}
        write_identity(file, json.dumps(known).encode())
        before = everything(tmp_path)
        for options in ({}, {"read_only": True}, {"recovery": "strict"}):
            with pytest.raises(
                StoreMismatchError, match=f"version {version}, expected .* version 1"
            ):
                open_store(tmp_path / "s", **options)
        assert everything(tmp_path) == before

    @pytest.mark.parametrize("version", [0, 2])
    def test_a_file_of_another_version_is_refused_untouched(
        self, tmp_path: Path, version: int
    ) -> None:
        """E6."""
        with filled(tmp_path / "s") as store:
            segment = store.volume.files.of(int(store.volume.records.live_places()[0]))
            file, header = Path(segment.path), segment.header
        page = bytearray(header.encode())
        struct.pack_into("<I", page, 8, version)
        body = header_body(page)
        page[: len(body) + 16] = body + xxhash.xxh3_128_digest(body)
        data = bytearray(file.read_bytes())
        data[:4096] = page
        file.write_bytes(data)
        with pytest.raises(StoreMismatchError, match=f"version {version}, expected 1"):
            open_store(tmp_path / "s")
        assert file.read_bytes() == data

    def test_another_size_of_segments_is_refused(self, tmp_path: Path) -> None:
        """E6."""
        filled(tmp_path / "s").close()
        with pytest.raises(StoreMismatchError, match="segments have 65536 bytes, expected 131072"):
            open_store(tmp_path / "s", segment="128KiB")
        with open_store(tmp_path / "s", segment=None) as store:
            assert store.get_many(KEYS) == VALUES


def header_body(page: bytearray) -> bytes:
    """The fields of a header page, before their checksum: see docs/format.md."""
    return bytes(page[:80])


def write_identity(file: Path, body: bytes) -> None:
    file.write_bytes(body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a directory, and what is in them."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """Names of files that are new, gone or different, save the locks."""
    names = {name for name in before | after if before.get(name) != after.get(name)}
    return {name for name in names if not name.endswith(("LOCK", "lock.mdb"))}


class TestForeignFiles:
    def test_what_is_not_ours_is_left_alone(self, tmp_path: Path) -> None:
        """E7. By opening, clearing, checking, resizing and closing."""
        with filled(tmp_path / "s") as store:
            home = Path(store.volume.directory)
        outside = tmp_path / "outside.seg"
        outside.write_bytes(b"precious")
        segments = home / "segments"
        (segments / "00000099.seg").mkdir()
        (segments / "00000099.seg" / "inside").write_bytes(b"kept")
        (segments / "00000050.seg").symlink_to(outside)
        (segments / "notes.txt").write_bytes(b"mine")
        (segments / "0001.seg").write_bytes(b"almost")
        (segments / "00000051.SEG").write_bytes(b"almost")
        odd = os.fsencode(segments) + b"/\xff\xfe odd"
        fd = os.open(odd, os.O_CREAT | os.O_WRONLY)
        os.close(fd)
        (home / "README").write_bytes(b"mine")
        (tmp_path / "s" / "other").mkdir()
        foreign = {
            name: data for name, data in everything(tmp_path).items() if "/0000000" not in name
        }
        foreign = {n: d for n, d in foreign.items() if not n.endswith((".mdb", "LOCK", "IDENTITY"))}
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES
            store.check(fix=True)
            store.clear()
            store.check(fix=True)
            store.resize(disk="128KiB")
            store.resize(disk="1MiB")
        after = everything(tmp_path)
        assert {name: after.get(name) for name in foreign} == foreign
        assert outside.read_bytes() == b"precious"
        assert (segments / "00000050.seg").is_symlink()
        assert os.path.lexists(odd)

    @pytest.mark.parametrize("name", ["IDENTITY", "segments", "directory", "LOCK"])
    @pytest.mark.parametrize("kind", ["link", "wrong kind"])
    def test_a_name_of_ours_that_is_something_else_is_refused(
        self, tmp_path: Path, name: str, kind: str
    ) -> None:
        """E7. No link is followed: it could lead anywhere."""
        with filled(tmp_path / "s") as store:
            path = Path(store.volume.directory) / name
        path.rename(tmp_path / "moved")
        if kind == "link":
            path.symlink_to(tmp_path / "moved")
        elif name in ("IDENTITY", "LOCK"):
            path.mkdir()
        else:
            path.write_bytes(b"")
        before = everything(tmp_path / "moved") if (tmp_path / "moved").is_dir() else {}
        with pytest.raises(StoreMismatchError, match=f"{name}' is not what a store keeps under"):
            open_store(tmp_path / "s")
        assert not before or everything(tmp_path / "moved") == before

    def test_files_and_directories_are_for_their_owner_only(self, tmp_path: Path) -> None:
        """E7."""
        before = os.umask(0)
        try:
            filled(tmp_path / "s").close()
        finally:
            os.umask(before)
        for path in (tmp_path / "s").rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


class TestPaths:
    def test_a_path_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        """E8."""
        (tmp_path / "s").write_bytes(b"a file")
        for path in (tmp_path / "s", tmp_path / "s" / "deeper"):
            with pytest.raises(ConfigError, match=r"path=.* cannot hold a store \(Not a directory"):
                open_store(path)
        assert (tmp_path / "s").read_bytes() == b"a file"

    def test_a_missing_parent_is_refused(self, tmp_path: Path) -> None:
        """E8."""
        with pytest.raises(ConfigError, match=r"No such file or directory.*whose parent exists"):
            open_store(tmp_path / "no" / "such" / "place")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("path", [None, 7, "nul\0byte", b"bytes"], ids=shown)
    def test_what_is_no_path_is_refused(self, path: Any) -> None:
        """E8."""
        with pytest.raises(ConfigError, match=r"path=.*: expected the path of a directory"):
            open_store(path)

    def test_a_very_long_path_is_refused(self, tmp_path: Path) -> None:
        """E8."""
        with pytest.raises(ConfigError, match="File name too long"):
            open_store(tmp_path / ("n" * 300))
        with pytest.raises(ConfigError, match="File name too long"):
            open_store(tmp_path / "/".join(["n" * 200] * 30))

    def test_a_relative_path_is_where_it_was_when_the_store_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E8."""
        monkeypatch.chdir(tmp_path)
        with filled(Path("s")) as store:
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            store.resize(disk="1MiB")
            store.clear()
            store.put_many(KEYS, VALUES)
            store.sync()
            assert store.get_many(KEYS) == VALUES
        assert list((tmp_path / "elsewhere").iterdir()) == []
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES


class TestClocks:
    @pytest.mark.parametrize("jump", [-1e9, -1, 0, 1e9])
    def test_a_clock_that_jumps_changes_no_order_and_ends_leases_only_when_they_are_over(
        self, tmp_path: Path, jump: float
    ) -> None:
        """E9."""
        clock = FakeClock(1e6)
        with filled(tmp_path / "s", clock=clock, admission=EnduranceBudget("1GB")) as store:
            lease = store.lease_many(KEYS, owner="test", seconds=100)
            clock.jump(jump)
            assert store.put(KEYS[0], b"new")
            assert lease.is_live == (jump < 100)
            assert store.get(KEYS[0]) == b"new"
            store.validate()

    def test_of_equal_times_the_later_put_wins_also_when_opened_again(self, tmp_path: Path) -> None:
        """E9. Order is by sequence."""
        clock = FakeClock()
        with open_store(tmp_path / "s", clock=clock) as store:
            for number in range(20):
                clock.jump(-1)
                store.put(b"a", b"%d" % number)
        with open_store(tmp_path / "s", clock=clock) as store:
            assert store.get(b"a") == b"19"


class TestResize:
    def test_fewer_bytes_than_are_used_evicts_the_least_used(self, tmp_path: Path) -> None:
        """E10."""
        keys = [b"%d" % i for i in range(21)]
        with open_store(tmp_path / "s") as store:
            assert store.put_many(keys, [content(i, 16_000) for i in range(21)]).all()
            store.touch_many(keys[:3])
            store.resize(disk="192KiB")
            stats = store.stats()
            assert stats.disk_bytes <= 192 << 10
            assert stats.records + stats.dropped["evicted"] == 21
            assert store.get_many(keys[:3]) == [content(i, 16_000) for i in range(3)]
            store.validate()
            store.resize(disk="1MiB")
            assert store.stats().disk_bytes <= 1 << 20
            assert store.put_many(keys, [content(i, 16_000) for i in range(21)]).all()
        with open_store(tmp_path / "s", disk="1MiB") as store:
            assert store.get_many(keys) == [content(i, 16_000) for i in range(21)]

    def test_a_store_that_opens_with_less_evicts_what_does_not_fit(self, tmp_path: Path) -> None:
        """E10, P6."""
        keys = [b"%d" % i for i in range(21)]
        with open_store(tmp_path / "s") as store:
            assert store.put_many(keys, [content(i, 16_000) for i in range(21)]).all()
        with open_store(tmp_path / "s", disk="192KiB") as store:
            assert store.stats().disk_bytes <= 192 << 10
            assert 0 < len(store) <= 6
            for key, value in zip(keys, store.get_many(keys), strict=True):
                assert value in (None, content(int(key), 16_000))
            store.validate()

    def test_what_is_leased_is_in_the_way(self, tmp_path: Path) -> None:
        """E10."""
        with filled(tmp_path / "s") as store:
            store.get_many(KEYS)
            lease = store.lease_many(KEYS, owner="reader", seconds=9)
            with pytest.raises(CapacityError, match="1 leases hold values in it: release them"):
                store.resize(dram="256KiB")
            lease.release()
            store.resize(dram="256KiB")
            assert store.stats().dram_bytes <= 256 << 10
            assert store.get_many(KEYS) == VALUES

    @pytest.mark.parametrize("size", [0, -1, "x", math.nan, 1], ids=shown)
    def test_a_size_that_is_none_is_refused_and_changes_nothing(
        self, tmp_path: Path, size: Any
    ) -> None:
        """E10."""
        with filled(tmp_path / "s") as store:
            store.get_many(KEYS)
            for option in ("disk", "dram"):
                with pytest.raises(ConfigError, match=f"{option}="):
                    store.resize(**{option: size})
            assert store.get_many(KEYS) == VALUES
            assert store.stats().hits["dram"] >= 8


class TestWrap:
    def test_the_order_of_uses_survives_the_end_of_its_counter(self, tmp_path: Path) -> None:
        """E11."""
        keys = [b"%d" % i for i in range(21)]
        with open_store(tmp_path / "s", dram="128KiB") as store:
            store.volume.records.tick = (1 << 32) - 5
            for i, key in enumerate(keys):
                assert store.put(key, content(i, 16_000))
            for key in keys[:6]:
                assert store.get(key) is not None
            for number in range(9):
                assert store.put(b"new %d" % number, bytes(16_000))
            assert all(key in store for key in keys[:6])
            store.validate()

    def test_more_leases_than_16_bits_count_hold_their_value(self, tmp_path: Path) -> None:
        """E11, D6."""
        with open_store(tmp_path / "s", disk="128KiB", dram="80KiB") as store:
            assert store.put(b"a", content(0, 16_000))
            assert store.get(b"a") is not None
            lease = store.lease_many([b"a"] * (1 << 16), owner="test", seconds=600)
            for number in range(9):
                store.put(b"x %d" % number, bytes(16_000))
                store.get(b"x %d" % number)
            assert bytes(lease.values[0] or b"") == content(0, 16_000)
            assert b"a" in store
            lease.release()
            assert not store.volume.records.pins.any()

    def test_sequences_beyond_32_bits_and_near_their_end_are_in_order(self, tmp_path: Path) -> None:
        """E11."""
        for start in ((1 << 32) - 3, (1 << 53) - 3, (1 << 62) - 3, (1 << 63) - 40):
            with filled(tmp_path / f"{start}") as store:
                store.volume.sequence = start
                for number in range(8):
                    assert store.put(b"a", b"%d" % number)
            with open_store(tmp_path / f"{start}") as store:
                assert store.get(b"a") == b"7"
                assert store.get_many(KEYS) == VALUES
                assert store.volume.sequence >= start + 8

    def test_offsets_beyond_4_gib_are_right(self, tmp_path: Path) -> None:
        """E11. A sparse file stands for one of 5 GiB."""

        class Sparse(FileIO):
            def allocate(self, fd: int, offset: int, length: int) -> None:
                self.truncate(fd, max(self.size(fd), offset + length))

            def free_bytes(self, path: str) -> int:
                return 1 << 40

        options = {"disk": "5200MiB", "segment": "5GiB", "io": Sparse()}
        with open_store(tmp_path / "s", **options) as store:
            large = content(0, 1 << 20)
            assert store.put(b"first", large)
            free = store.volume._space.free(1 << 20)
            places = free.content()
            far = places[places > places.min() + 4500]
            free.discard(slice(int(places.min()), int(far.min())))
            assert store.put_many([b"far", b"k" * 300], [large, large[:-400]]).all()
            place = int(store.volume.records.live_places().max())
            assert store.volume.files.of(place).offset(place) > 1 << 32
            assert store.get_many([b"first", b"far", b"k" * 300]) == [large, large, large[:-400]]
        with open_store(tmp_path / "s", **options) as store:
            assert store.get_many([b"first", b"far", b"k" * 300]) == [large, large, large[:-400]]


def forge(store: KeyedStore, key: bytes, changes: dict[str, int]) -> None:
    """Kill a store, change fields of a row, and give it a right check again, as attackers can.

    Nothing is synced: a table that is not as the directory says would be dropped as a whole.
    """
    place = int(np.flatnonzero(store.volume.records.rows["key_bytes"] == len(key))[0])
    segment = store.volume.files.of(place)
    file, header, extent = Path(segment.path), segment.header, place - segment.first
    store.volume.abandon()
    data = bytearray(file.read_bytes())
    start = 4096 + extent * ROW.itemsize
    row = np.frombuffer(data[start : start + ROW.itemsize], ROW).copy()
    for name, value in changes.items():
        row[name] = value
    binding = place_binding(header) + struct.pack("<Q", extent)
    row["check"] = row_check(row.tobytes(), binding)
    data[start : start + ROW.itemsize] = row.tobytes()
    file.write_bytes(data)


FORGED = {
    "value_bytes": [0, 1, 4999, 5001, SEGMENT + 1, (1 << 31) - 1, (1 << 32) - 1],
    "stored_bytes": [0, 4999, 5001, 8193, SEGMENT, (1 << 31) + 1, (1 << 32) - 1],
    "key_bytes": [0, 2, 48, 49, 511, 512, (1 << 16) - 1],
    "sequence": [(1 << 63), (1 << 64) - 1],
    "codec": [1, 63, 255],
    "state": [3, 255],
    "valid": [(1 << 32) - 1],
}


class TestMalice:
    @pytest.mark.parametrize(
        ("field", "value"), [(field, value) for field, values in FORGED.items() for value in values]
    )
    def test_a_forged_row_is_a_miss_of_bounded_cost(
        self, tmp_path: Path, field: str, value: int
    ) -> None:
        """E12. Its own check is right, and it says what cannot be."""
        store = open_store(tmp_path / "s")
        store.put_many([b"k", b"other"], [VALUES[0], VALUES[1]])
        forge(store, b"k", {field: value})
        with open_store(tmp_path / "s", dram="128KiB") as store:
            for _ in range(2):
                assert store.get(b"k") is None
                assert store.get(b"other") == VALUES[1]
            out = np.zeros((2, 5000), np.uint8)
            assert store.get_into([b"k", b"other"], out).tolist() == [-1, 5000]
            for key in list(store):
                store.get(key)
            assert store.put(b"k", b"new")
            assert store.get(b"k") == b"new"
            store.validate()

    def test_lengths_that_overflow_when_added_are_no_row(self, tmp_path: Path) -> None:
        """E12."""
        store = open_store(tmp_path / "s")
        store.put_many([b"k", b"other"], [VALUES[0], VALUES[1]])
        forge(store, b"k", {"stored_bytes": (1 << 32) - 100, "key_bytes": 511})
        with open_store(tmp_path / "s") as store:
            assert store.get_many([b"k", b"other"]) == [None, VALUES[1]]

    @pytest.mark.parametrize(
        "changes",
        [
            {"extents": 1 << 40}, {"extents": (1 << 64) - 1, "extent_bytes": 4096},
            {"extent_bytes": 1 << 62}, {"extent_bytes": 4097}, {"extent_bytes": 0}, {"extents": 8},
        ],
        ids=shown,
    )  # fmt: skip
    def test_a_forged_header_is_none(self, tmp_path: Path, changes: dict[str, int]) -> None:
        """E12. What it says is compared with the size of the file before anything is made."""
        with filled(tmp_path / "s") as store:
            segment = store.volume.files.of(int(store.volume.records.live_places()[0]))
            file, header = Path(segment.path), segment.header
        body = bytearray(header_body(bytearray(header.encode())))
        forged = replace(header, **changes)  # type: ignore[arg-type]
        start = header.data_offset if "extents" not in changes else 1 << 20
        struct.pack_into("<QQQ", body, 56, forged.extent_bytes, forged.extents, start)
        data = bytearray(file.read_bytes())
        data[: len(body) + 16] = bytes(body) + xxhash.xxh3_128_digest(bytes(body))
        assert Header.decode(bytes(data[:4096]), len(data)) is None
        file.write_bytes(data)
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS[:5]) == [None] * 5
            assert store.put_many(KEYS, VALUES).all()
            assert store.get_many(KEYS) == VALUES

    def test_a_key_in_two_rows_has_its_newest_value(self, tmp_path: Path) -> None:
        """E12. As after a lost write of the older row's end."""
        store = open_store(tmp_path / "s")
        store.put_many([b"k", b"other"], [b"old", b"other"])
        store.put(b"k", b"new")
        forge(store, b"k", {"state": LIVE})
        with open_store(tmp_path / "s") as store:
            assert store.get(b"k") == b"new"
            assert len(store) == 2
            assert store.delete(b"k")
            assert store.get(b"k") is None
            store.validate()
        with open_store(tmp_path / "s") as store:
            assert store.get(b"k") is None

    @pytest.mark.parametrize(
        "body",
        [
            b"[" * 30_000, b'{"a":' * 10_000, b"{}", b"[]", b"7", b"null", b"\xff\xfe", b"",
            b'{"format":"tierstore","version":1}',
            b'{"format":"tierstore","version":1,"identity":7,"epoch":1,"segment_bytes":65536}',
            b'{"format":"tierstore","version":1,"identity":{"x":1},"epoch":1,"segment_bytes":65536}',
            b'{"format":"tierstore","version":1,"identity":{},"epoch":-1,"segment_bytes":65536}',
            b'{"format":"tierstore","version":1,"identity":{},"epoch":1e99,"segment_bytes":65536}',
            b'{"format":"tierstore","version":1,"identity":{},"epoch":true,"segment_bytes":"x"}',
        ],
        ids=lambda body: body[:40].decode("latin-1"),
    )  # fmt: skip
    def test_an_identity_file_of_nonsense_is_damage(self, tmp_path: Path, body: bytes) -> None:
        """E12. Its check is right, so somebody has written it so."""
        with filled(tmp_path / "s") as store:
            file = Path(store.volume.directory) / "IDENTITY"
        write_identity(file, body)
        with pytest.raises(CorruptBlockError, match="damaged identity"):
            open_store(tmp_path / "s", recovery="strict")
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES
        facts = Facts.decode(file.read_bytes(), "here")
        assert facts is not None
        assert facts.identity.model == "test"

    def test_an_identity_file_of_a_gigabyte_is_not_read(self, tmp_path: Path) -> None:
        """E12."""
        with filled(tmp_path / "s") as store:
            file = Path(store.volume.directory) / "IDENTITY"
        os.truncate(file, 1 << 30)
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES
        assert file.stat().st_size < 4096

    def test_no_data_is_ever_unpickled(self) -> None:
        """E13. Nor evaluated: the package does not know how.

        But for the suites for policies, which copy a policy of their own making that way.
        """
        forbidden = re.compile(
            r"\b(pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b|allow_pickle\s*=\s*True"
            r"|(?<![.\w])eval\(|(?<![.\w])exec\(|yaml\.load\b|torch\.load\("
        )
        package = Path(tierstore.__file__).parent
        suites = set((package / "testing").glob("policy_*.py"))
        files = [file for file in package.rglob("*.py") if file not in suites]
        assert len(files) > 50
        found = [
            f"{file}: {line}"
            for file in files
            for line in file.read_text().splitlines()
            if forbidden.search(line.split("#")[0])
        ]
        assert found == []


class TestMany:
    def test_a_hundred_thousand_small_values_take_the_memory_that_is_promised(
        self, tmp_path: Path
    ) -> None:
        """E14. At most 128 bytes a record, with 32-byte keys; and no quadratic work."""
        count = 100_000
        keys = np.random.default_rng(0).integers(0, 256, (count, 32), np.uint8)

        class Sparse(FileIO):
            def allocate(self, fd: int, offset: int, length: int) -> None:
                self.truncate(fd, max(self.size(fd), offset + length))

        with open_store(tmp_path / "s", disk="420MiB", segment="100MiB", io=Sparse()) as store:
            for start in range(0, count, 10_000):
                part = keys[start : start + 10_000]
                assert store.put_many(part, [b"x"] * len(part)).all()
            records = store.volume.records
            capacity = len(records.rows)
            assert len(store) == count
            columns = ROW_BYTES + 4 * 4
            assert records.nbytes <= capacity * (columns + 12) + 4096
            assert columns + 12 <= 128
            assert store.contains_many(keys).all()

    def test_keys_that_collide_for_another_seed_do_not_collide_here(self, tmp_path: Path) -> None:
        """E14. Who knows the hash does not know its seed."""
        with open_store(tmp_path / "s") as one, open_store(tmp_path / "t") as two:
            assert one.volume.records._seed != two.volume.records._seed

    def test_opening_many_records_in_a_child_costs_bounded_memory(self, tmp_path: Path) -> None:
        """E14, E12."""
        script = """
            import pathlib, resource, sys
            from keyed_stores import open_store
            path = pathlib.Path(sys.argv[1])
            with open_store(path, disk="40MiB", segment="8MiB") as store:
                store.put_many([b"%d" % i for i in range(8000)], [b"x"] * 8000)
            open_store(path, disk="40MiB", segment="8MiB").close()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(3):
                with open_store(path, disk="40MiB", segment="8MiB") as store:
                    assert len(store) == 8000
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
        child = in_child(script, tmp_path / "s")
        assert int(child.stdout) < 64 << 10, child.stderr
