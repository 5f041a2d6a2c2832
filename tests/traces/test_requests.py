"""Request traces: what is stored comes back, and damaged files are refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, TraceError
from tierstore.traces import generators
from tierstore.traces.file import write_trace
from tierstore.traces.readers import read_oracle_general, read_requests
from tierstore.traces.requests import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Callable

MOONCAKE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl"
PTR = np.array([0, 2, 2, 3])
BLOCKS = np.array([2**64 - 1, 7, 7], np.uint64)


def same(a: RequestTrace, b: RequestTrace) -> bool:
    names = ("request_ptr", "blocks", "sizes", "timestamps", "categories", "costs")
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    return a.facts == b.facts and all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, y)) for x, y in pairs
    )


def test_a_trace_comes_back(tmp_path: Path) -> None:
    bare = RequestTrace(PTR, BLOCKS)
    full = RequestTrace(
        PTR,
        BLOCKS,
        np.array([5, 6, 6]),
        np.array([1, 2, 3]),
        np.array([0, 0, 9]),
        np.array([0.5, 1.5, 1.5]),
        {"block_tokens": 16},
    )
    for trace in (bare, full):
        trace.save(tmp_path / "a.trace")
        assert same(read_requests(tmp_path / "a.trace"), trace)
    assert full.requests == 3
    assert full.distinct == 2
    assert full.keys.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"request_ptr": PTR}, "expected arrays request_ptr, blocks"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "more": PTR}, "found blocks, more, request_ptr"),
        ({"request_ptr": PTR.astype(np.int32), "blocks": BLOCKS}, r"expected int64 \[n\]"),
        ({"request_ptr": PTR[:-1], "blocks": BLOCKS}, "expected to rise from 0 to"),
        ({"request_ptr": PTR[:0], "blocks": BLOCKS[:0]}, "expected to rise from 0 to"),
        ({"request_ptr": np.array([0, 3, 2, 3]), "blocks": BLOCKS}, "expected to rise from 0 to"),
        (
            {"request_ptr": np.array([0, 2**62, 5 - 2**63, len(BLOCKS)]), "blocks": BLOCKS},
            "expected to rise from 0 to",
        ),
        ({"request_ptr": PTR, "blocks": BLOCKS, "sizes": PTR}, r"sizes: expected int64 \[3\]"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "sizes": np.array([1, 0, 0])}, "bytes above 0"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "sizes": np.array([1, 2, 3])}, "one size for each"),
        (
            {"request_ptr": PTR, "blocks": BLOCKS, "costs": PTR[1:]},
            r"costs: expected float64 \[3\]",
        ),
        (
            {"request_ptr": PTR, "blocks": BLOCKS, "costs": np.array([1, 0.0, 0])},
            "above 0, found 0",
        ),
        ({"request_ptr": PTR, "blocks": BLOCKS, "costs": np.array([np.inf] * 3)}, "found inf"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "costs": np.array([1, np.nan, 1])}, "found nan"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "costs": np.array([1, 2, 3.0])}, "one cost for"),
        ({"request_ptr": PTR, "blocks": BLOCKS, "timestamps": PTR}, r"timestamps: expected int64"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    write_trace(tmp_path / "a.trace", "requests", {}, arrays)
    with pytest.raises(TraceError, match=message):
        read_requests(tmp_path / "a.trace")


def test_sizes_whose_sum_would_wrap_round_are_refused() -> None:
    ptr, blocks = np.arange(3), np.arange(2, dtype=np.uint64)
    RequestTrace(ptr, blocks, sizes=np.full(2, 2**61))
    with pytest.raises(TraceError, match="at most 4611686018427387904 bytes in all"):
        RequestTrace(ptr, blocks, sizes=np.full(2, 2**62))


@pytest.mark.parametrize(
    "blocks",
    [[1.5], [-1], np.array([-1]), [2**64], [np.nan], np.array([np.nan]), ["5"], "abc", [None],
     [object()], [[1], [1, 2]], [True], [1j]],
)  # fmt: skip
def test_what_is_no_hash_is_refused(blocks: Any) -> None:  # noqa: ANN401
    with pytest.raises(TraceError, match=r"blocks: expected hashes from 0 to 2\*\*64 - 1, found"):
        RequestTrace.of_blocks(blocks)


@pytest.mark.parametrize("blocks", [[2**64 - 1, 0], [2**63, 1], [], (3,), [np.uint8(3)], [4.0]])
def test_hashes_are_taken_from_lists(blocks: Any) -> None:  # noqa: ANN401
    assert RequestTrace.of_blocks(blocks).blocks.tolist() == [int(block) for block in blocks]


@pytest.mark.parametrize("blocks", [5, [[1, 2]]])
def test_hashes_have_one_axis(blocks: Any) -> None:  # noqa: ANN401
    with pytest.raises(TraceError, match=r"blocks: expected uint64 \[n\], found uint64"):
        RequestTrace.of_blocks(blocks)


def test_lists_are_no_arrays() -> None:
    wrong: Any = [0, 1]
    with pytest.raises(TraceError, match=r"request_ptr: expected int64 \[n\], found list"):
        RequestTrace(wrong, BLOCKS)
    with pytest.raises(TraceError, match=r"sizes: expected int64 \[n\], found list"):
        RequestTrace(PTR, BLOCKS, sizes=wrong)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_requests(tmp_path / "none.jsonl")


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        {"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [0, 2**64 - 1]},
        {"timestamp": 7, "hash_ids": []},
        {"timestamp": 7, "hash_ids": [0]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_requests(path)
    assert trace.request_ptr.tolist() == [0, 2, 2, 3]
    assert trace.blocks.tolist() == [0, 2**64 - 1, 0]
    assert trace.timestamps is not None
    assert trace.timestamps.tolist() == [5, 7, 7]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"timestamp": 1}',
        '{"timestamp": 1, "hash_ids": [-1]}',
        '{"timestamp": 1, "hash_ids": [true]}',
        '{"timestamp": 1, "hash_ids": [1.5]}',
        '{"timestamp": 1, "hash_ids": 3}',
        f'{{"timestamp": 1, "hash_ids": [{2**64}]}}',
        '{"hash_ids": [1]}',
        '{"timestamp": "1", "hash_ids": [1]}',
        "\ud800",
        "[" * 200_000,
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"timestamp": 1, "hash_ids": [1]}\n'
    path.write_text(good + line + "\n", errors="surrogatepass")
    with pytest.raises(TraceError, match="line 2: expected"):
        read_requests(path)


def test_the_published_mooncake_trace_has_the_published_facts() -> None:
    if not MOONCAKE.is_file():
        pytest.skip(f"{MOONCAKE} is not here")
    trace = read_requests(MOONCAKE)
    assert (trace.requests, len(trace.blocks), trace.distinct) == (12_031, 288_500, 182_790)


records = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=20
)


@given(records, st.booleans())
def test_records_of_libcachesim_are_read(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int]], compressed: bool
) -> None:
    path = tmp_path_factory.mktemp("traces") / ("a.oracleGeneral" + ".zst" * compressed)
    data = b"".join(
        time.to_bytes(4, "little")
        + key.to_bytes(8, "little")
        + (key % 1000 + 1).to_bytes(4, "little")
        + (-1).to_bytes(8, "little", signed=True)
        for time, key in requests
    )
    path.write_bytes(zstandard.compress(data) if compressed else data)
    trace = read_requests(path)
    assert trace.blocks.tolist() == [key for _, key in requests]
    assert trace.sizes is not None
    assert trace.sizes.tolist() == [key % 1000 + 1 for _, key in requests]
    assert trace.timestamps is not None
    assert trace.timestamps.tolist() == [1000 * time for time, _ in requests]


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(25))
    with pytest.raises(TraceError, match="expected records of 24 bytes, found 25 bytes"):
        read_requests(path)
    path.write_bytes(bytes(24))
    with pytest.raises(TraceError, match="sizes above 0, found 0 in record 0"):
        read_requests(path)
    whole = zstandard.compress(b"\x01" * 24 * 9)
    for damaged in (whole[:-1], whole[:9], whole + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match="Zstandard"):
            read_requests(path)


def test_compressed_records_unpack_to_a_limit(tmp_path: Path) -> None:
    """Few bytes may hold many: a limit that is looked at when all is unpacked is none."""
    path = tmp_path / "a.bin.zst"
    stream = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        for _ in range(256):
            file.write(stream.compress(b"\x01" * (1 << 20)))
        file.write(stream.flush())
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"at most 1000 bytes, found more: unpack it first"):
        read_oracle_general(path, unpacked_bytes_max=1000)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 128 << 20
    path.write_bytes(zstandard.compress(b"\x01" * 24 * 9))
    with pytest.raises(TraceError, match="at most 215 bytes"):
        read_oracle_general(path, unpacked_bytes_max=215)
    assert read_oracle_general(path, unpacked_bytes_max=216).requests == 9


def test_generators_repeat_themselves_and_depend_on_their_seed() -> None:
    makers: tuple[Callable[[int], RequestTrace], ...] = (
        lambda seed: generators.zipf(500, 90, seed=seed),
        lambda seed: generators.phase_shift(2, 200, 50, 20, seed=seed),
        lambda seed: generators.sessions(60, seed=seed),
    )
    for make in makers:
        assert same(make(1), make(1))
        assert not same(make(1), make(2))
    assert generators.loop(5, 2).blocks.tolist() == [0, 1, 0, 1, 0]
    assert generators.scan(4).blocks.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="requests=0: expected a whole number from 1"):
        generators.scan(0)
    with pytest.raises(ConfigError, match=r"blocks=1\d+: expected .* from 1 to 1073741824"):
        generators.zipf(10, 10**13)


def test_sessions_look_like_conversations() -> None:
    """Three quarters of the blocks are used once, and every request begins with the root."""
    trace = generators.sessions()
    assert 0.74 < (np.bincount(trace.keys) == 1).mean() < 0.78
    assert (trace.blocks[trace.request_ptr[:-1]] == 0).all()
    assert len(trace.blocks) > 30_000


def test_calls_in_sessions_are_not_continued_and_chats_are() -> None:
    """Of a call only the prompt is used again, of most chats much more."""
    trace = generators.sessions()
    assert trace.categories is not None
    kinds, shares = np.unique(trace.categories, return_counts=True)
    assert kinds.tolist() == [generators.CHAT, generators.CALL]
    assert 0.3 < shares[1] / trace.requests < 0.4
    used_once = np.bincount(trace.keys)[trace.keys] == 1
    category = np.repeat(trace.categories, np.diff(trace.request_ptr))
    prompts = trace.blocks < 100
    assert used_once[(category == generators.CALL) & ~prompts].all()
    assert used_once[(category == generators.CHAT) & ~prompts].mean() < 0.4
    for calls in (0.0, 1.0):
        only = generators.sessions(20, calls=calls)
        assert only.categories is not None
        assert (only.categories == (generators.CALL if calls else generators.CHAT)).all()
    with pytest.raises(ConfigError, match=r"calls=1.5: expected a share in \[0, 1\]"):
        generators.sessions(calls=1.5)


def test_reuse_in_sessions_comes_within_minutes() -> None:
    trace = generators.sessions()
    assert trace.timestamps is not None
    when = np.repeat(trace.timestamps, np.diff(trace.request_ptr))
    order = np.argsort(trace.keys, kind="stable")
    again = trace.keys[order[1:]] == trace.keys[order[:-1]]
    assert (np.diff(when[order])[again] < 5 * 60_000).mean() > 0.99


def test_a_zipf_trace_has_the_frequencies_of_its_law() -> None:
    counts = np.bincount(generators.zipf(200_000, 100, 1.0).keys)
    expected = 1 / np.arange(1, 101)
    np.testing.assert_allclose(counts / 200_000, expected / expected.sum(), atol=0.004)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (generators.zipf, {"skew": np.nan}), (generators.zipf, {"skew": np.inf}),
        (generators.zipf, {"skew": -1.0}), (generators.zipf, {"skew": "1"}),
        (generators.zipf, {"requests": 1.5}), (generators.zipf, {"blocks": np.nan}),
        (generators.zipf, {"seed": -1}), (generators.zipf, {"seed": None}),
        (generators.sessions, {"turns": np.nan}), (generators.sessions, {"turns": 0.5}),
        (generators.sessions, {"calls": np.nan}), (generators.sessions, {"concurrent": 0}),
        (generators.sessions, {"seed": 0.5}), (generators.phase_shift, {"scan": -1}),
        (generators.phase_shift, {"seed": -1}), (generators.loop, {"requests": np.nan}),
        (generators.scan, {"requests": "9"}),
    ],
)  # fmt: skip
def test_a_trace_is_made_of_numbers(make: Callable[..., object], options: dict[str, Any]) -> None:
    (name,) = options
    required = {generators.scan: ["requests"], generators.sessions: [], generators.phase_shift: []}
    given = dict.fromkeys(required.get(make, ["requests", "blocks"]), 9) | options
    with pytest.raises(ConfigError, match=f"^{name}=.*: expected a "):
        make(**given)
