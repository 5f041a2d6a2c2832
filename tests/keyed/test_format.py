"""The on-disk format, by a reader that knows docs/format.md and nothing of the code.

The reader uses struct, json, xxhash, lmdb and zstandard only; the store under test is met at its
public face (but for the table of codecs). The golden store pins the bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import lmdb
import numpy as np
import pytest
import xxhash
import zstandard
from golden_store import CODED, IDENTITY, SEGMENT, VALUES, files, make, noise, unpack

from tierstore.codecs import (
    Fp8Codec,
    Int4Codec,
    Int8Codec,
    K8V4Codec,
    RawCodec,
    ShuffleZstdCodec,
)
from tierstore.errors import StoreMismatchError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.volume.format import CODECS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Codec

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
RAW = "meta-llama-Llama-3-8B-93177e946830106f3ba47b9853243087"
CODED_FOLDER = "meta-llama-Llama-3-8B-adbd327ce3f514b5d79b91f2ff3f84b3"
ZEROS = bytes(4096)


# The reader


class RefusedError(Exception):
    """The store is not for this reader."""


@dataclass(frozen=True)
class Facts:
    digest: bytes
    epoch: int
    segment_bytes: int


@dataclass(frozen=True)
class Row:
    segment: int
    extent: int
    sequence: int
    codec: int
    value_bytes: int
    state: int
    key: bytes
    stored: bytes


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def read_identity(text: bytes) -> Facts | None:
    body, check, rest = text.split(b"\n")
    if rest or xxhash.xxh3_128_hexdigest(body).encode() != check:
        return None
    known = json.loads(body)
    if known["format"] != "tierstore" or known["version"] != 1:
        raise RefusedError("version")
    digest = xxhash.xxh3_128_digest(canonical({"version": 1, **known["identity"]}))
    return Facts(digest, known["epoch"], known["segment_bytes"])


@dataclass(frozen=True)
class Header:
    place: bytes
    epoch: int
    generation: int
    extent_bytes: int
    extents: int
    start: int


def read_header(page: bytes, facts: Facts) -> Header | None:
    """The header; None if it is none, or damaged."""
    fields = struct.unpack_from("<8sII16sQQQQQQ16s", page)
    magic, version, page_bytes, digest, epoch, number, generation, size, count, start, check = (
        fields
    )
    if xxhash.xxh3_128_digest(page[:80]) != check or magic != b"TIERSEG\n":
        return None
    if version != 1 or digest != facts.digest:
        raise RefusedError("header")
    is_right = (
        page_bytes == 4096
        and start == 4096 + -(-96 * count // 4096) * 4096
        and size % 4096 == 0
        and (size > 0) == (count > 0)
        and start + size * count <= facts.segment_bytes
    )
    place = digest + struct.pack("<QQQ", epoch, number, generation)
    return Header(place, epoch, generation, size, count, start) if is_right else None


def read_row(content: bytes, header: Header, extent: int, segment_bytes: int) -> Row | None:
    """The row with its payload; None if it is free, or anything about it is damaged."""
    row = content[4096 + 96 * extent :][:96]
    sequence, checksum, stored, value, key_bytes, codec, state, _, key, check = struct.unpack(
        "<Q16sIIHBBI48sQ", row
    )
    place = header.place + struct.pack("<Q", extent)
    if sequence == 0 or xxhash.xxh3_64_intdigest(row[:88] + place) != check:
        return None
    tail_bytes = key_bytes if key_bytes > 48 else 0
    is_right = (
        state in (1, 2)
        and sequence < 1 << 62
        and 1 <= key_bytes <= 511
        and stored + tail_bytes <= header.extent_bytes
        and value <= segment_bytes
        and (codec != 0 or value == stored)
    )
    if not is_right:
        return None
    payload = content[header.start + header.extent_bytes * extent :][: stored + tail_bytes]
    covered = xxhash.xxh3_128_digest(payload) + place + row[:8] + row[24:35] + row[36:88]
    if state == 1 and xxhash.xxh3_128_digest(covered) != checksum:
        return None
    whole = payload[stored:] if tail_bytes else key[:key_bytes]
    if tail_bytes and state == 1:
        assert key == whole[:40] + xxhash.xxh3_64_digest(whole)
    number = struct.unpack_from("<Q", header.place, 24)[0]
    return Row(number, extent, sequence, codec, value, state, whole, payload[:stored])


def rows_of(content: bytes, facts: Facts) -> list[Row]:
    content = content[: facts.segment_bytes].ljust(facts.segment_bytes, b"\0")
    header = read_header(content[:4096], facts)
    if header is None or header.epoch != facts.epoch:
        return []
    found = (
        read_row(content, header, extent, facts.segment_bytes) for extent in range(header.extents)
    )
    return [row for row in found if row is not None]


def decoded(row: Row) -> bytes:
    if row.codec == 0:
        return row.stored
    assert row.codec == 1
    mark, body = row.stored[0], row.stored[1:]
    if mark == 0:
        return body
    assert zstandard.frame_content_size(body) == row.value_bytes
    planes = zstandard.ZstdDecompressor().decompress(body)
    size = len(planes) // mark
    whole = bytearray(len(planes))
    for i in range(mark):
        whole[i::mark] = planes[size * i : size * (i + 1)]
    return bytes(whole)


def newest(rows: list[Row]) -> dict[bytes, bytes]:
    live = sorted((row for row in rows if row.state == 1), key=lambda row: row.sequence)
    return {row.key: decoded(row) for row in live}


def read_store(directory: Path) -> dict[bytes, bytes]:
    """Key to value."""
    facts = read_identity((directory / "IDENTITY").read_bytes())
    assert facts is not None
    rows = []
    for path in sorted((directory / "segments").iterdir()):
        rows += [row for row in rows_of(path.read_bytes(), facts) if row.segment == int(path.stem)]
    return newest(rows)


def read_directory(directory: Path) -> dict[bytes, bytes]:
    path = str(directory / "directory")
    with (
        lmdb.open(path, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor())


# The golden store


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the committed store: the namespace without a codec."""
    return unpack(tmp_path) / RAW


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for those who only read."""
    return unpack(tmp_path_factory.mktemp("golden")) / RAW


def open_golden(
    directory: Path,
    *,
    codec: Codec | None = None,
    recovery: Literal["quiet", "strict"] = "quiet",
    read_only: bool = False,
) -> KeyedStore:
    return KeyedStore(
        directory.parent, IDENTITY, disk="1MiB", codec=codec, recovery=recovery, read_only=read_only
    )


def test_the_golden_store_is_written_again_byte_by_byte(pristine: Path, tmp_path: Path) -> None:
    make(tmp_path)
    fresh, committed = files(tmp_path / "kv" / RAW), files(pristine)
    own = [name for name in committed if not name.startswith("directory/")]
    assert len(own) == 1 + 6
    assert {name: fresh[name] for name in own} == {name: committed[name] for name in own}
    assert fresh.keys() - committed.keys() == {"LOCK", "directory/lock.mdb"}
    assert read_directory(tmp_path / "kv" / RAW) == read_directory(pristine)


def test_the_golden_store_is_read_by_the_document_alone(pristine: Path) -> None:
    assert read_store(pristine) == VALUES
    assert read_store(pristine.parent / CODED_FOLDER) == CODED


def test_the_golden_store_is_read_by_the_library(golden: Path) -> None:
    with open_golden(golden, recovery="strict") as store:
        assert dict(zip(VALUES, store.get_many(list(VALUES)), strict=True)) == VALUES
        assert sorted(store.keys()) == sorted(VALUES)
        assert store.get(b"of an earlier epoch") is None
        assert store.get(b"deleted") is None
        assert store.check() == []
    with open_golden(golden, codec=ShuffleZstdCodec(), recovery="strict") as store:
        assert dict(zip(CODED, store.get_many(list(CODED)), strict=True)) == CODED


def test_the_golden_store_goes_on_where_it_was(golden: Path) -> None:
    """A newer sequence wins, so the numbers must continue above those on disk."""
    with open_golden(golden) as store:
        store.put(b"short", b"replaced")
    assert read_store(golden) == VALUES | {b"short": b"replaced"}


def test_a_store_of_many_values_is_read_by_the_document_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    sizes = random.integers(0, 30_000, 300)
    values = {
        noise(f"key {i}", 1 + i % 511): noise(f"value {i}", int(size))
        for i, size in enumerate(sizes)
    }
    with KeyedStore(tmp_path / "kv", Identity(), disk="24MiB", segment="512KiB") as store:
        assert store.put_many(list(values), list(values.values())).all()
        gone = list(values)[::3]
        store.delete_many(gone)
        changed = {key: noise("changed", 5_000) for key in list(values)[1::3]}
        store.put_many(list(changed), list(changed.values()))
    (directory,) = (tmp_path / "kv").iterdir()
    expected = {key: value for key, value in (values | changed).items() if key not in set(gone)}
    assert read_store(directory) == expected


# The directory


def check_of(digest: bytes, key: bytes, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(digest + key + body)


def test_the_directory_has_the_digest_of_every_group(pristine: Path) -> None:
    facts = read_identity((pristine / "IDENTITY").read_bytes())
    assert facts is not None
    entries = read_directory(pristine)
    for key, value in entries.items():
        assert value[-8:] == check_of(facts.digest, key, value[:-8])
    version, epoch, sequence, clean = struct.unpack("<IQQB", entries.pop(b"m")[:-8])
    assert (version, epoch, clean) == (1, facts.epoch, 1)
    known = {}
    for key, value in entries.items():
        _, segment, group = struct.unpack(">sII", key)
        known[segment, group] = struct.unpack("<Q16s", value[:-8])
    used = 0
    for path in sorted((pristine / "segments").iterdir()):
        content = path.read_bytes()
        header = read_header(content[:4096], facts)
        if header is not None and header.epoch == facts.epoch:
            used += 1
            digest = xxhash.xxh3_128_digest(content[4096:][: 96 * header.extents])
            assert known[int(path.stem), 0] == (header.generation, digest)
            assert max(row.sequence for row in rows_of(content, facts)) < sequence
    assert used == 3


# Damage


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def bits_of(pristine: Path, what: str) -> Iterator[tuple[str, int, bytes | None]]:
    """Segment file, bit, and key that is lost; None for all of the file."""
    facts = read_identity((pristine / "IDENTITY").read_bytes())
    assert facts is not None
    for path in sorted((pristine / "segments").iterdir()):
        content = path.read_bytes()
        rows = [row for row in rows_of(content, facts) if row.state == 1]
        header = read_header(content[:4096], facts)
        if not rows or header is None:
            continue
        name = f"segments/{path.name}"
        if what == "header":
            yield from ((name, bit, None) for bit in range(96 * 8))
            continue
        row = rows[-1]
        if what == "row":
            first = 4096 + 96 * row.extent
            span = range(first * 8, (first + 96) * 8)
        else:
            first = header.start + header.extent_bytes * row.extent
            size = len(row.stored) + (len(row.key) if len(row.key) > 48 else 0)
            span = range(first * 8, (first + size) * 8)
        yield from ((name, bit, row.key) for bit in span)


def lost_keys(pristine: Path, name: str, key: bytes | None) -> set[bytes]:
    facts = read_identity((pristine / "IDENTITY").read_bytes())
    assert facts is not None
    everything = {row.key for row in rows_of((pristine / name).read_bytes(), facts)}
    return everything if key is None else {key}


@pytest.mark.parametrize("what", ["header", "row", "payload"])
def test_every_flipped_bit_costs_its_record_and_no_other(pristine: Path, what: str) -> None:
    facts = read_identity((pristine / "IDENTITY").read_bytes())
    assert facts is not None
    contents = {name: path for name, path in files(pristine).items() if name.endswith(".seg")}
    right = {name: newest(rows_of(content, facts)) for name, content in contents.items()}
    bits = list(bits_of(pristine, what))
    assert len(bits) >= 3 * 96 * 8
    # A payload has too many bits for a reader in Python: a prime stride meets every bit position.
    for name, bit, key in bits[:: 101 if what == "payload" else 1]:
        expected = {k: v for k, v in right[name].items() if key not in (None, k)}
        assert newest(rows_of(flipped(contents[name], bit), facts)) == expected, (name, bit)


@pytest.mark.parametrize("what", ["header", "row", "payload"])
def test_the_library_loses_what_the_document_says(golden: Path, what: str) -> None:
    """One flipped bit at a time, at 20 places: reader and library must agree about all values."""
    bits = list(bits_of(golden, what))
    for name, bit, _ in bits[:: len(bits) // 20]:
        path = golden / name
        before = path.read_bytes()
        path.write_bytes(flipped(before, bit))
        expected = read_store(golden)
        with open_golden(golden, read_only=True) as store:
            got = dict(zip(VALUES, store.get_many(list(VALUES)), strict=True))
        assert {key: value for key, value in got.items() if value is not None} == expected
        assert len(expected) < len(VALUES)
        path.write_bytes(before)


# What must be refused


def test_an_identity_of_a_newer_version_is_refused(golden: Path) -> None:
    path = golden / "IDENTITY"
    body = path.read_bytes().split(b"\n")[0].replace(b'"version":1', b'"version":2')
    newer = body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
    path.write_bytes(newer)
    before = files(golden)
    with pytest.raises(StoreMismatchError, match="version 2, expected 'tierstore' version 1"):
        open_golden(golden)
    with pytest.raises(RefusedError):
        read_store(golden)
    assert {n: c for n, c in files(golden).items() if n in before and n != "LOCK"} == before


def test_a_segment_of_a_newer_version_is_refused(golden: Path) -> None:
    path = golden / "segments" / "00000004.seg"
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", 2)
    content[80:96] = xxhash.xxh3_128_digest(bytes(content[:80]))
    path.write_bytes(content)
    with pytest.raises(StoreMismatchError, match="format version 2, expected 1"):
        open_golden(golden)
    with pytest.raises(RefusedError):
        read_store(golden)
    assert path.read_bytes() == content


def test_a_segment_of_another_namespace_is_refused(golden: Path) -> None:
    """E12. The other store is of the same model, so only the digest tells them apart."""
    other = golden.parent / CODED_FOLDER / "segments" / "00000000.seg"
    shutil.copy(other, golden / "segments" / "00000000.seg")
    with pytest.raises(StoreMismatchError, match="belongs to another store"):
        open_golden(golden)
    with pytest.raises(RefusedError):
        read_store(golden)


def test_a_copy_of_a_segment_under_another_number_counts_for_nothing(golden: Path) -> None:
    """A4. Its rows and payloads are right among themselves: only the number tells."""
    used = golden / "segments" / "00000004.seg"
    shutil.copy(used, golden / "segments" / "00000000.seg")
    assert read_store(golden) == VALUES
    with open_golden(golden) as store:
        assert store.stats().dropped == {"damaged segment header": 1}
        assert dict(zip(VALUES, store.get_many(list(VALUES)), strict=True)) == VALUES
        store.delete(b"short")
    with open_golden(golden) as store:
        assert store.get(b"short") is None
    assert b"short" not in read_store(golden)


# The document


def hexdump(content: bytes, first: int, size: int) -> str:
    lines = []
    for at in range(first, first + size, 16):
        part = content[at : min(at + 16, first + size)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {part.hex(' '):<47}  |{text}|")
    return "\n".join(lines)


def described(pristine: Path, what: str) -> str:
    """What the document's block after the comment `what` should be."""
    kind, *words = what.replace("dump:", "dump").split()
    if kind == "canonical":
        known = json.loads((pristine / "IDENTITY").read_bytes().split(b"\n")[0])
        whole = canonical({"version": 1, **known["identity"]})
        return f"{whole.decode()}\n{xxhash.xxh3_128_hexdigest(whole)}"
    if kind == "directory":
        entries = sorted(read_directory(pristine).items())
        return "\n".join(f"{key.hex()}\n    {value.hex()}" for key, value in entries)
    content = (pristine / words[0]).read_bytes()
    if len(words) == 1:
        return content.decode().rstrip("\n")
    return hexdump(content, int(words[1]), int(words[2]))


BLOCK = re.compile(r"<!-- ((?:dump: .*?)|canonical|directory) -->\n```text\n(.*?)```", re.DOTALL)


def test_the_dumps_in_the_document_are_of_the_golden_store(pristine: Path) -> None:
    blocks = BLOCK.findall(DOCUMENT.read_text())
    assert len(blocks) == 5
    for what, shown in blocks:
        assert shown.rstrip("\n") == described(pristine, what)


def test_codecs_have_the_numbers_of_the_document() -> None:
    (listed,) = re.findall(r"^Codecs: (.*?)\. A namespace", DOCUMENT.read_text(), re.M | re.S)
    shown = {int(number): name for number, name in re.findall(r"(\d) `([\w+]+)`", listed)}
    kinds = (ShuffleZstdCodec, Int8Codec, Int4Codec, K8V4Codec, Fp8Codec)
    assert shown == {kind.code: kind.name for kind in kinds}
    assert (RawCodec.name, *shown.values()) == CODECS


def test_a_payload_ends_below_what_a_row_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KeyedStore(tmp_path / "kv", Identity(), disk="2MiB", segment=SEGMENT) as store:
        assert store.volume.largest == SEGMENT - 2 * 4096
        with monkeypatch.context() as patch:
            patch.setattr(store.volume.files, "nbytes", 1 << 34)
            assert store.volume.largest == 2**32 - 4096


def test_size_classes_are_those_of_the_document(tmp_path: Path) -> None:
    """Read from headers: the store chooses the extents, the document says which there are."""
    pages = [*range(1, 9), *(q << n for n in range(1, 4) for q in (5, 6, 7, 8))]
    sizes = [1, 4096, 4097, 8 * 4096, 8 * 4096 + 1, 11 * 4096, 17 * 4096, 33 * 4096, 57 * 4096]
    with KeyedStore(tmp_path / "kv", Identity(), disk="24MiB", segment=SEGMENT * 8) as store:
        for size in sizes:
            store.put(b"%d" % size, bytes(size))
    (directory,) = (tmp_path / "kv").iterdir()
    facts = read_identity((directory / "IDENTITY").read_bytes())
    assert facts is not None
    found = {}
    for path in (directory / "segments").iterdir():
        content = path.read_bytes()
        header = read_header(content[:4096], facts)
        if header is not None and header.extents:
            room = facts.segment_bytes - header.start - header.extents * header.extent_bytes
            assert room < header.extent_bytes + 4096
            for row in rows_of(content, facts):
                found[int(row.key)] = header.extent_bytes
    expected = {size: min(p * 4096 for p in pages if p * 4096 >= size) for size in sizes}
    assert found == expected
