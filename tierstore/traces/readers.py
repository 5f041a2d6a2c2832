"""Request traces in the formats of others: Mooncake's JSON lines, libCacheSim's binary records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import zstandard

from tierstore.arguments import check_whole
from tierstore.errors import TraceError
from tierstore.traces.requests import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable

_MOONCAKE_BLOCK_TOKENS = 512
ORACLE_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next_access", "<i8")])
"""A request in libCacheSim's format oracleGeneral."""
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_MOST = 2**63
UNPACKED_BYTES_MAX = 1 << 30
"""Compressed records unpack to no more than this, 44 million requests, if a call does not say."""
_AT_ONCE = 1 << 10
"""Compressed bytes taken in at once: Zstandard makes at most some 32 thousand bytes of each."""


def read_mooncake(path: str | Path) -> RequestTrace:
    """A trace of Mooncake (FAST 2025): one JSON object a line, with ``timestamp``, ``hash_ids``.

    Each id names a block of 512 tokens together with all before it. TraceError names the line.
    """
    chains: list[list[int]] = []
    times: list[int] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            chain, time = _mooncake_request(line, f"{path}, line {number}")
            chains.append(chain)
            times.append(time)
    ptr = np.cumsum([0, *map(len, chains)]).astype(np.int64)
    blocks = np.array([block for chain in chains for block in chain], np.uint64)
    facts = {"block_tokens": _MOONCAKE_BLOCK_TOKENS, "source": "mooncake"}
    return RequestTrace(ptr, blocks, timestamps=np.array(times, np.int64), facts=facts)


def _mooncake_request(line: bytes, place: str) -> tuple[list[int], int]:
    try:
        request: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{place}: expected a JSON object, found {error}") from error
    chain = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(chain, list) or not all(_is_count(block, 2 * _MOST) for block in chain):
        raise TraceError(f"{place}: expected hash_ids, a list of numbers from 0 to 2**64 - 1")
    time = request.get("timestamp")
    if not _is_count(time, _MOST):
        raise TraceError(f"{place}: expected timestamp, whole milliseconds; found {time!r}")
    return chain, time


def _is_count(value: object, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def read_oracle_general(
    path: str | Path, unpacked_bytes_max: int = UNPACKED_BYTES_MAX
) -> RequestTrace:
    """A trace of libCacheSim in its binary format oracleGeneral, perhaps compressed by Zstandard.

    unpacked_bytes_max: the most that a compressed file may unpack to, since a small file may hold
    more than there is memory. TraceError beyond; a file that is not compressed has no limit.

    Records of 24 bytes, little-endian: uint32 seconds, uint64 id, uint32 bytes, int64 number of the
    next request for the id, which is not used. Each record is a request for one block; an id whose
    size changes keeps its first. TraceError if the file ends within a record.
    """
    check_whole("unpacked_bytes_max", unpacked_bytes_max, 0)
    with Path(path).open("rb") as file:
        start = file.read(len(_ZSTANDARD))
        file.seek(0)
        data = _unpacked(file, unpacked_bytes_max) if start == _ZSTANDARD else file.read()
    if len(data) % ORACLE_RECORD.itemsize:
        raise TraceError(
            f"{path}: expected records of {ORACLE_RECORD.itemsize} bytes, found {len(data)} bytes"
        )
    records = np.frombuffer(data, ORACLE_RECORD)
    if len(records) and not records["size"].all():
        raise TraceError(
            f"{path}: expected sizes above 0, found 0 in record {int(np.argmin(records['size']))}"
        )
    ids = records["id"].astype(np.uint64)
    _, first, keys = np.unique(ids, return_index=True, return_inverse=True)
    return RequestTrace(
        np.arange(len(ids) + 1),
        ids,
        sizes=records["size"].astype(np.int64)[first][keys],
        timestamps=1000 * records["time"].astype(np.int64),
        facts={"source": "libCacheSim"},
    )


def _unpacked(file: BinaryIO, most: int) -> bytearray:
    """What one frame of Zstandard holds, the whole of the file."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    content = bytearray()
    while not stream.eof and (packed := file.read(_AT_ONCE)):
        try:
            content += stream.decompress(packed)
        except zstandard.ZstdError as error:
            raise TraceError(f"{file.name}: expected Zstandard data, found {error}") from error
        if len(content) > most:
            raise TraceError(
                f"{file.name}: expected to unpack to at most {most} bytes, found more: unpack it "
                "first, or pass more as unpacked_bytes_max"
            )
    if not stream.eof or stream.unused_data or file.read(1):
        raise TraceError(f"{file.name}: expected whole Zstandard data, found less or more")
    return content


def read_requests(path: str | Path) -> RequestTrace:
    """A request trace in whichever of the known formats the file has.

    Mooncake's files end in ``.jsonl``, libCacheSim's in ``.bin``, ``.oracleGeneral`` or those and
    ``.zst``, up to `UNPACKED_BYTES_MAX` unpacked; any other is one of tierstore. TraceError if it
    cannot be read.
    """
    path = Path(path)
    try:
        return _reader(path)(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _reader(path: Path) -> Callable[[Path], RequestTrace]:
    name = path.name.removesuffix(".zst")
    if name.endswith(".jsonl"):
        return read_mooncake
    if name.endswith((".bin", ".oracleGeneral")):
        return read_oracle_general
    return RequestTrace.load
