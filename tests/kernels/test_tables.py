"""The directory's loops: compiled and plain Python agree, and each does what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import tables
from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

Arguments = tuple[Any, ...]
Array = npt.NDArray[Any]

# Compiled code reads out-of-range indices without complaint; plain Python raises IndexError.
LOOPS = [
    "judge",
    "install",
    "remove",
    "collect",
    "lowest",
    "gather_scores",
    "copy_rows",
    "copy_pieces",
    "eligible",
    "first_bad_victim",
    "append_tokens",
]


class Directory:
    """Random tables: two to five segments in up to three domains, half of the blocks resident."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.segments = int(random.integers(2, 6))
        self.blocks = random.integers(1, 3 * CHUNK, self.segments)
        per_segment = -(-self.blocks // CHUNK)
        free = random.permutation(per_segment.sum() + 2).tolist()
        self.chunks = np.full((self.segments, per_segment.max()), -1, np.int32)
        self.owner_segment = np.full(len(free), -1, np.int32)
        self.owner_index = np.full(len(free), -1, np.int32)
        for segment, chunks in enumerate(per_segment.tolist()):
            for index in range(chunks):
                chunk = free.pop()
                self.chunks[segment, index] = chunk
                self.owner_segment[chunk], self.owner_index[chunk] = segment, index
        handles = len(self.owner_segment) * CHUNK
        self.valid_of = random.integers(0, 5, handles).astype(np.uint8)
        self.leases = random.integers(0, 2, handles).astype(np.int32)
        self.last_used = random.integers(0, 4, handles)
        self.domain_of = random.integers(0, 3, self.segments).astype(np.int32)
        self.slot_of = np.full(handles, -1, np.int32)
        self.position = np.full(handles, -1, np.int32)
        self.handle_of = np.full(handles, -1, np.int32)
        self.members = np.full((3, handles), -1, np.int32)
        self.counts = np.zeros(3, np.int32)
        everyone = random.permutation(self.all_handles())
        self.residents, self.absent = np.split(everyone, [len(everyone) // 2])
        for slot, handle in enumerate(self.residents.tolist()):
            domain = self.domain(handle)
            self.slot_of[handle], self.handle_of[slot] = slot, handle
            self.position[handle] = self.counts[domain]
            self.members[domain, self.counts[domain]] = handle
            self.counts[domain] += 1

    def handle(self, segment: int, block: int) -> int:
        return int(self.chunks[segment, block // CHUNK]) * CHUNK + block % CHUNK

    def domain(self, handle: int) -> int:
        return int(self.domain_of[self.owner_segment[handle // CHUNK]])

    def all_handles(self) -> Array:
        pairs = ((s, b) for s in range(self.segments) for b in range(self.blocks[s]))
        return np.array([self.handle(s, b) for s, b in pairs], np.int32)

    def selection(self) -> tuple[Array, Array, Array]:
        """Some segments, row pointers, and some blocks of each."""
        segments = self.random.permutation(self.segments).astype(np.int32)
        picks = [
            self.random.permutation(self.blocks[s])[: self.random.integers(0, 9)] for s in segments
        ]
        row_ptr = np.concatenate([[0], np.cumsum([len(p) for p in picks])])
        return segments, row_ptr, np.concatenate(picks).astype(np.int32)

    def arguments(self, name: str) -> Arguments:
        """Arguments for the loop called `name`, outputs included."""
        return {
            "judge": self._judge,
            "install": self._install,
            "remove": self._remove,
            "collect": self._collect,
            "lowest": self._lowest,
            "gather_scores": self._gather_scores,
            "copy_rows": self._copy_rows,
            "copy_pieces": self._copy_pieces,
            "eligible": self._eligible,
            "first_bad_victim": self._first_bad_victim,
            "append_tokens": self._append_tokens,
        }[name]()

    def _judge(self) -> Arguments:
        segments, row_ptr, blocks = self.selection()
        n = len(blocks)
        return (self.chunks, self.blocks, segments, row_ptr, blocks, self.slot_of, self.valid_of,
                self.last_used, 9, empty(n), empty(n), empty(n, np.uint8))  # fmt: skip

    def _install(self) -> Arguments:
        handles = self.absent[:5]
        slots = len(self.residents) + self.random.permutation(5)[: len(handles)].astype(np.int32)
        domains = np.array([self.domain(handle) for handle in handles], np.int32)
        return (handles, slots, domains, self.slot_of, self.handle_of, self.members, self.counts,
                self.position)  # fmt: skip

    def _remove(self) -> Arguments:
        handles = self.random.permutation(self.residents)[:7]
        domains = np.array([self.domain(handle) for handle in handles], np.int32)
        return (handles, domains, self.slot_of, self.handle_of, self.members, self.counts,
                self.position, empty(len(handles)))  # fmt: skip

    def _collect(self) -> Arguments:
        domains = np.array([2, 0], np.int32)
        return (
            domains,
            self.members,
            self.counts,
            empty(3, np.int64),
            empty(self.counts[domains].sum()),
        )

    def _lowest(self) -> Arguments:
        sizes = self.random.integers(0, 30, 4)
        n, row_ptr = sizes.sum(), np.concatenate([[0], np.cumsum(sizes)])
        rank = self.random.integers(0, 5, n).astype(np.float32)
        tie = self.random.integers(0, 3, n)
        need = np.minimum(sizes, self.random.integers(0, 20, 4))
        return rank, tie, row_ptr, need, empty(n), empty(need.sum())

    def _gather_scores(self) -> Arguments:
        rows = self.random.permutation(self.segments)[: self.segments - 1]
        row_of = np.full(self.segments, -1, np.int32)
        row_of[rows] = np.arange(len(rows))
        unit_of = self.random.integers(-1, 6, (self.random.choice([1, len(rows)]), 2 * CHUNK))
        scores = self.random.standard_normal((len(rows), 6)).astype(np.float32)
        out = empty(len(self.residents), np.float32)
        return (self.residents, self.owner_segment, self.owner_index, row_of,
                unit_of.astype(np.int32), scores, out)  # fmt: skip

    def _copy_rows(self) -> Arguments:
        source = self.random.integers(0, 256, (6, 32)).astype(np.uint8)
        target = self.random.integers(0, 256, (8, 32)).astype(np.uint8)
        start, stop = np.sort(self.random.integers(0, 33, 2)).tolist()
        rows = self.random.integers(0, 6, 4), self.random.permutation(8)[:4]
        return source, rows[0].astype(np.int32), target, rows[1].astype(np.int32), start, stop

    def _copy_pieces(self) -> Arguments:
        source = self.random.integers(0, 256, 200).astype(np.uint8)
        target = self.random.integers(0, 256, (8, 32)).astype(np.uint8)
        start, stop = np.sort(self.random.integers(0, 33, 2)).tolist()
        at, rows = self.random.integers(0, 168, 4), self.random.permutation(8)[:4]
        return source, at, target, rows.astype(np.int32), start, stop

    def _eligible(self) -> Arguments:
        row_ptr = np.array([0, len(self.residents) // 2, len(self.residents)])
        may_leave = empty(len(self.residents), np.bool_)
        return (
            self.residents,
            row_ptr,
            self.leases,
            self.last_used,
            2,
            may_leave,
            empty(2, np.int64),
        )

    def _first_bad_victim(self) -> Arguments:
        free = [h for h in self.residents if self.leases[h] == 0 and self.last_used[h] < 2]
        strange = [*self.absent[:1], -1, len(self.slot_of), *free[:1], *self.residents[:1]]
        extra = self.random.choice(np.array(strange, np.int32), self.random.integers(0, 2))
        victims = np.concatenate([np.array(free, np.int32), extra.astype(np.int32)])
        domains = np.array([self.domain(h % len(self.slot_of)) for h in victims], np.int32)
        return (victims, domains, self.domain_of, self.owner_segment, self.slot_of, self.leases,
                self.last_used, 2)  # fmt: skip

    def _append_tokens(self) -> Arguments:
        heads, sequences = 2, 3
        strips = [self.random.integers(0, 99, (heads * sequences, 5, dim)) for dim in (4, 6)]
        tokens = [self.random.integers(0, 99, (heads * sequences, dim)) for dim in (4, 6)]
        lengths = np.repeat(self.random.integers(0, 5, sequences), heads).astype(np.int32)
        keep = self.random.random(sequences) < 0.6
        return (*(s.astype(np.uint16) for s in strips), lengths, keep,
                *(t.astype(np.uint16) for t in tokens))  # fmt: skip


def empty(n: int, dtype: type[np.generic] = np.int32) -> Array:
    """An output that no loop may read: full of a striking number."""
    return np.full(n, 77).astype(dtype)


def called(loop: Callable[..., Any], arguments: Arguments) -> tuple[Any, Arguments]:
    """What the loop returns and what it leaves in copies of its arguments."""
    own = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)
    return loop(*own), own


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", LOOPS)
@given(seeds)
def test_compiled_loop_does_what_its_python_says(name: str, seed: int) -> None:
    arguments = Directory(seed).arguments(name)
    loop = getattr(tables, name)

    found, left = called(loop, arguments)

    expected, left_by_python = called(loop.py_func, arguments)
    assert found == expected
    for mine, other in zip(left, left_by_python, strict=True):
        np.testing.assert_array_equal(mine, other)


@given(seeds)
def test_judging_finds_slots_and_stamps_what_it_saw(seed: int) -> None:
    directory = Directory(seed)
    segments, row_ptr, blocks = directory.selection()
    rows = np.repeat(segments, np.diff(row_ptr))
    expected = [directory.handle(s, b) for s, b in zip(rows.tolist(), blocks.tolist(), strict=True)]
    handles, slots, valid = empty(len(blocks)), empty(len(blocks)), empty(len(blocks), np.uint8)
    before = directory.last_used.copy()

    misses = tables.judge(
        directory.chunks, directory.blocks, segments, row_ptr, blocks, directory.slot_of,
        directory.valid_of, directory.last_used, 9, handles, slots, valid,
    )  # fmt: skip

    assert handles.tolist() == expected
    assert slots.tolist() == directory.slot_of[expected].tolist()
    assert valid.tolist() == directory.valid_of[expected].tolist()
    assert misses == sum(handle in set(directory.absent.tolist()) for handle in expected)
    before[expected] = 9
    np.testing.assert_array_equal(directory.last_used, before)


@given(seeds)
def test_removing_and_installing_leave_lists_and_tables_in_step(seed: int) -> None:
    directory = Directory(seed)
    gone = directory.arguments("remove")
    new = directory.arguments("install")

    tables.remove(*gone)
    tables.install(*new)

    held = (set(directory.residents.tolist()) - set(gone[0].tolist())) | set(new[0].tolist())
    assert set(np.flatnonzero(directory.slot_of >= 0).tolist()) == held
    for domain in range(3):
        members = directory.members[domain, : directory.counts[domain]].tolist()
        assert sorted(members) == sorted(h for h in held if directory.domain(h) == domain)
        assert [directory.position[h] for h in members] == list(range(len(members)))
    assert all(directory.handle_of[directory.slot_of[handle]] == handle for handle in held)
    assert sorted(directory.handle_of[directory.handle_of >= 0].tolist()) == sorted(held)


RANKS = [
    st.integers(0, 4).map(float),
    st.floats(-30, 5, width=32),
    st.sampled_from([-np.inf, -1.0, 0.0, 1e-45, 3e38, np.inf]),
]


@given(
    st.sampled_from(RANKS).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(ranks, st.integers(0, 2)), max_size=300), max_size=4
        )
    ),
    st.data(),
)
def test_lowest_takes_the_first_of_a_sorted_list(
    rows: list[list[tuple[float, int]]], data: st.DataObject
) -> None:
    need = [data.draw(st.integers(0, len(row))) for row in rows]
    entries = [entry for row in rows for entry in row]
    rank, tie = (np.array([entry[i] for entry in entries]) for i in range(2))
    row_ptr = np.cumsum([0, *map(len, rows)])
    picks = empty(sum(need))

    tables.lowest(
        rank.astype(np.float32), tie.astype(np.int64), row_ptr, np.array(need, np.int64),
        empty(len(entries)), picks,
    )  # fmt: skip

    parts = np.split(picks, np.cumsum(need)[:-1]) if need else []
    for part, start, row, wanted in zip(parts, row_ptr[:-1].tolist(), rows, need, strict=True):
        ordered = sorted((r, t, start + i) for i, (r, t) in enumerate(row))
        assert sorted(part.tolist()) == sorted(at for _, _, at in ordered[:wanted])


@given(seeds)
def test_scores_are_those_of_the_unit_or_none(seed: int) -> None:
    directory = Directory(seed)
    handles, owner_segment, owner_index, row_of, unit_of, scores, out = directory.arguments(
        "gather_scores"
    )

    tables.gather_scores(handles, owner_segment, owner_index, row_of, unit_of, scores, out)

    for handle, found in zip(handles.tolist(), out.tolist(), strict=True):
        segment = int(owner_segment[handle // CHUNK])
        block = next(
            b for b in range(directory.blocks[segment]) if directory.handle(segment, b) == handle
        )
        row = int(row_of[segment])
        table = unit_of[row if len(unit_of) > 1 else 0] if row >= 0 else []
        unit = int(table[block]) if block < len(table) else -1
        assert found == (scores[row, unit] if unit >= 0 else -np.inf)


@pytest.mark.parametrize(
    "spoil",
    ["repeated", "absent", "leased", "used in this step", "of another domain", "no handle at all"],
)
def test_a_victim_that_may_not_leave_is_found(spoil: str) -> None:
    directory = Directory(3)
    directory.leases[:], directory.last_used[:] = 0, 0
    victims = directory.residents[:4].copy()
    domains = np.array([directory.domain(handle) for handle in victims], np.int32)
    if spoil == "repeated":
        victims[2], domains[2] = victims[0], domains[0]
    elif spoil == "absent":
        victims[2] = directory.absent[0]
    elif spoil == "leased":
        directory.leases[victims[2]] = 1
    elif spoil == "used in this step":
        directory.last_used[victims[2]] = 5
    elif spoil == "of another domain":
        domains[2] += 1
    else:
        victims[2] = len(directory.slot_of)

    found = tables.first_bad_victim(
        victims, domains, directory.domain_of, directory.owner_segment, directory.slot_of,
        directory.leases, directory.last_used, 5,
    )  # fmt: skip

    assert found == 2


def test_tokens_go_to_the_ends_of_strips_that_keep_them() -> None:
    keys, values = np.zeros((4, 3, 2), np.uint16), np.zeros((4, 3, 1), np.uint16)
    lengths = np.array([0, 0, 2, 2], np.int32)
    new_keys = np.arange(1, 9, dtype=np.uint16).reshape(4, 2)
    new_values = np.arange(11, 15, dtype=np.uint16).reshape(4, 1)

    tables.append_tokens(keys, values, lengths, np.array([False, True]), new_keys, new_values)

    assert lengths.tolist() == [0, 0, 3, 3]
    assert keys[2:, 2].tolist() == [[5, 6], [7, 8]]
    assert values[2:, 2].tolist() == [[13], [14]]
    assert keys.sum() == 26
    assert values.sum() == 27
