"""What every index must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.interfaces import IndexContext
from tierstore.kernels.element import to_array
from tierstore.memory import Memory
from tierstore.scratch import Scratch
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from tierstore.interfaces import Ids, Index, Selection
    from tierstore.kernels.element import Array


@dataclass(frozen=True)
class IndexSetting:
    """What an index is made for.

    group: query heads of a row. dim: head dimension. dtype: of keys and queries.
    block_tokens: tokens of a block. scale: factor of the logits.
    memory: where index and work space live.
    """

    memory: Memory
    group: int = 3
    dim: int = 8
    dtype: torch.dtype = torch.float32
    block_tokens: int = 4
    scale: float = 0.35


class IndexTests(ABC):
    """Inherit, and make the index. Rows are numbered as their segments minus 10."""

    ignores_budget: ClassVar[bool] = False
    """Whether the index selects more than it is asked for, as one that selects everything does."""

    reads_keys: ClassVar[bool] = True
    """Whether what it selects depends on the keys."""

    uses_memory: ClassVar[bool] = True
    """Whether the index lives in the memory of its setting."""

    @abstractmethod
    def make_index(self, setting: IndexSetting) -> Index:
        """An index without rows."""

    def _filled(self, setting: IndexSetting, blocks: list[int], seed: int = 0) -> Index:
        """An index whose row r has ``blocks[r]`` blocks of random keys."""
        index = self.make_index(setting)
        index.add_rows(_segments(len(blocks)))
        for row, count in enumerate(blocks):
            if count:
                _extend(index, setting, slice(row, row + 1), count, seed=seed + row)
        return index

    @pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
    def setting(self, request: pytest.FixtureRequest) -> IndexSetting:
        return IndexSetting(Memory(1 << 24), dtype=request.param)

    def test_a_budget_of_all_blocks_selects_all_blocks(self, setting: IndexSetting) -> None:
        blocks = [5, 1, 0, 40]
        index = self._filled(setting, blocks)
        for extra in (0, 3):
            selection = _select(index, setting, [n + extra for n in blocks])
            assert [sorted(row) for row in _rows(selection)] == [list(range(n)) for n in blocks]

    @law
    @given(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 34)), min_size=1, max_size=5),
        st.integers(0, 99),
    )
    def test_a_selection_keeps_to_budget_and_row(
        self, rows: list[tuple[int, int]], seed: int
    ) -> None:
        setting = IndexSetting(Memory(1 << 22))
        index = self._filled(setting, [blocks for blocks, _ in rows], seed)
        budgets = [budget for _, budget in rows]
        self._check(index, _select(index, setting, budgets, seed), [n for n, _ in rows], budgets)

    def _check(
        self, index: Index, selection: Selection, blocks: list[int], budgets: list[int]
    ) -> None:
        assert selection.row_ptr[0] == 0
        assert selection.row_ptr[-1] == len(selection.ids) == len(selection.scores)
        most = np.maximum(budgets, index.least) + index.kept
        for ids, count, budget in zip(_rows(selection), blocks, most.tolist(), strict=True):
            assert len(set(ids)) == len(ids), "a block is selected twice"
            assert all(0 <= block < count for block in ids)
            assert len(ids) <= (count if self.ignores_budget else min(budget, count))

    def test_equal_questions_have_equal_answers(self, setting: IndexSetting) -> None:
        index, blocks = self._filled(setting, [9, 30]), [4, 7]
        first = _frozen(_select(index, setting, blocks))
        _select(index, setting, [9, 1], seed=5)
        assert _frozen(_select(index, setting, blocks)) == first

    def test_a_part_selects_what_the_whole_selects_for_its_rows(
        self, setting: IndexSetting
    ) -> None:
        """Also after both have learned of more blocks, and in a work space of its own."""
        index = self._filled(setting, [9, 9, 30, 30])
        scratches = Scratch(setting.memory), Scratch(setting.memory)
        parts = [index.part(slice(first, first + 2), *scratches) for first in (0, 2)]
        if None in parts:
            pytest.skip("the index selects for all rows at once")
        for more in (0, 3):
            if more:
                for row in range(4):
                    _extend(index, setting, slice(row, row + 1), more, seed=40 + row)
            query, budgets = _query(setting, 4, seed=3), _ids([4, 9, 1, 12])
            whole = _rows(index.select(query, budgets))
            halves = []
            for part, rows in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
                assert part is not None
                selection = part.select(query[rows], budgets[rows])
                halves += _rows(selection)
                if selection.everything is not None:
                    assert selection.everything.segments.tolist() == _segments(4)[rows].tolist()
                    assert len(selection.everything.unit_scores) == 2
            assert [list(row) for row in halves] == [list(row) for row in whole]

    def test_scores_of_everything_cover_what_is_selected(self, setting: IndexSetting) -> None:
        """A policy looks scores up by segment and block; tables of one row serve all rows."""
        index = self._filled(setting, [9, 30, 2])
        selection = _select(index, setting, [9, 12, 1])
        everything = selection.everything
        if everything is None:
            pytest.skip("the index has no scores of other blocks")
        assert everything.segments.tolist() == _segments(3).tolist()
        assert len(everything.unit_scores) == 3
        assert len(everything.unit_of) in (1, 3)
        for row, ids in enumerate(_rows(selection)):
            units = everything.unit_of[min(row, len(everything.unit_of) - 1), ids]
            assert (units >= 0).all()
            assert np.isfinite(everything.unit_scores[row, units]).all()

    def test_scores_are_parts_of_the_attention_to_all_tokens(self, setting: IndexSetting) -> None:
        """Nothing beside, said or not, is the same; as much beside each head takes as much."""
        index, budgets = self._filled(setting, [9, 30]), _ids([4, 7])
        query = _query(setting, 2)
        alone = _frozen(index.select(query, budgets))
        beside = np.full((2, setting.group), -np.inf, np.float32)
        assert _frozen(index.select(query, budgets, beside)) == alone
        crowded = index.select(query, budgets, np.full_like(beside, 100))
        more = index.select(query, budgets, np.full_like(beside, 102))
        if index.gives_scores:
            assert _rows(more) == _rows(crowded)
            less = crowded.scores - more.scores
            # Scores that are no parts, such as logits, do not change.
            np.testing.assert_allclose(less, 2.0 if less.any() else 0.0, atol=1e-3)

    def test_rows_grow_in_pieces_of_any_size(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [2, 0])
        for row, count in ((0, 1), (1, 30), (0, 17), (1, 1)):
            _extend(index, setting, slice(row, row + 1), count, seed=count)
        self._check(index, _select(index, setting, [6, 50]), [20, 31], [6, 50])
        assert [len(row) for row in _rows(_select(index, setting, [99, 99]))] == [20, 31]

    def test_rows_may_be_added_later(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [5])
        index.add_rows(_segments(3)[1:])
        _extend(index, setting, slice(1, 3), 8)
        assert [len(row) for row in _rows(_select(index, setting, [9] * 3))] == [5, 8, 8]

    def test_truncated_blocks_are_not_selected(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [20, 20, 20])
        index.truncate(slice(0, 2), 7)
        index.truncate(slice(1, 2), 0)
        index.truncate(slice(2, 3), 50)
        self._check(index, _select(index, setting, [3, 3, 3]), [7, 0, 20], [3, 3, 3])
        assert [len(row) for row in _rows(_select(index, setting, [99] * 3))] == [7, 0, 20]
        for row in range(2):
            _extend(index, setting, slice(row, row + 1), 4)
        everything = _rows(_select(index, setting, [99] * 3))
        assert [sorted(row) for row in everything] == [list(range(n)) for n in (11, 4, 20)]

    def test_arranged_rows_select_what_their_sources_did(self, setting: IndexSetting) -> None:
        """Reordered, dropped and doubled, with the queries moved along."""
        index, sources = self._filled(setting, [4, 11, 25]), [2, 0, 2]
        query = _query(setting, 3)
        before = _rows(index.select(query, _ids([4, 3, 6])))
        index.arrange_rows(sources, _segments(6)[3:])
        after = _rows(index.select(query[sources], _ids([6, 4, 6])))
        assert after == [before[row] for row in sources]
        _extend(index, setting, slice(2, 3), 2)
        assert [len(row) for row in _rows(_select(index, setting, [99] * 3))] == [25, 4, 27]
        index.arrange_rows([], _segments(0))
        assert _rows(_select(index, setting, [])) == []

    def test_a_restored_index_selects_the_same(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [4, 11, 25])
        state = index.state()
        expected = _frozen(_select(index, setting, [2, 3, 9]))
        _extend(index, setting, slice(0, 1), 5)
        other = self.make_index(replace(setting, memory=Memory(1 << 24)))
        assert other.restore(state) is other
        assert _frozen(_select(other, setting, [2, 3, 9])) == expected
        _extend(other, setting, slice(0, 1), 5)
        assert [len(row) for row in _rows(_select(other, setting, [99] * 3))] == [9, 11, 25]

    def test_a_state_of_something_else_is_refused(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [4])
        expected = _frozen(_select(index, setting, [2]))
        for state in ({}, {"unknown": np.zeros(3)}):
            with pytest.raises(StoreMismatchError):
                index.restore(state)
        assert _frozen(_select(index, setting, [2])) == expected

    def test_its_bytes_are_what_its_memory_was_charged(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [4, 30])
        sizes = [index.nbytes]
        _extend(index, setting, slice(0, 2), 60)
        sizes.append(index.nbytes)
        index.arrange_rows([1, 1, 0, 0], _segments(4))
        sizes.append(index.nbytes)
        assert 0 < sizes[0] <= sizes[1] < sizes[2]
        if self.uses_memory:
            assert setting.memory.by_purpose()["index"] == sizes[2]

    @pytest.mark.parametrize("keys", ["equal", "zero", "huge", "opposite"])
    def test_keys_without_a_difference_are_still_selected(
        self, keys: str, setting: IndexSetting
    ) -> None:
        """Softmax over ties, over zeros, and over logits beyond the range of the dtype."""
        index, blocks = self.make_index(setting), [1, 12]
        index.add_rows(_segments(2))
        for row, count in enumerate(blocks):
            tokens = count * setting.block_tokens
            values = torch.ones(1, tokens, setting.dim)
            scale = torch.finfo(setting.dtype).max / 2
            sign = torch.arange(tokens)[:, None] % 2 * 2.0 - 1
            made = {
                "equal": values,
                "zero": 0 * values,
                "huge": scale * values,
                "opposite": sign * values,
            }
            key = made[keys].to(setting.dtype)
            index.extend(slice(row, row + 1), key, key, IndexContext())
        for budgets in ([1, 5], [0, 1], [1, 12]):
            selection = _select(index, setting, budgets)
            self._check(index, selection, blocks, budgets)
            for ids, budget in zip(_rows(selection), budgets, strict=True):
                assert ids or not budget

    @pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
    def test_keys_that_are_no_numbers_are_refused(
        self, broken: float, setting: IndexSetting
    ) -> None:
        """Nothing changes, and the row can go on with good ones."""
        if not self.reads_keys:
            pytest.skip("the index does not look at keys")
        index = self._filled(setting, [5])
        expected = _frozen(_select(index, setting, [3]))
        keys = torch.zeros(1, 2 * setting.block_tokens, setting.dim, dtype=setting.dtype)
        keys[0, -1, 0] = broken
        with pytest.raises(ConfigError, match="NaN or infinity"):
            index.extend(slice(0, 1), keys, keys, IndexContext())
        assert _frozen(_select(index, setting, [3])) == expected

    def test_without_blocks_nothing_is_selected(self, setting: IndexSetting) -> None:
        index = self._filled(setting, [0, 0])
        assert _rows(_select(index, setting, [3, 0])) == [[], []]


def _segments(rows: int) -> Ids:
    return np.arange(10, 10 + rows, dtype=np.int32)


def _ids(numbers: list[int]) -> Ids:
    return np.array(numbers, np.int32)


def _extend(index: Index, setting: IndexSetting, rows: slice, blocks: int, seed: int = 0) -> None:
    shape = (rows.stop - rows.start, blocks * setting.block_tokens, setting.dim)
    keys, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    index.extend(rows, keys.to(setting.dtype), values.to(setting.dtype), IndexContext())


def _query(setting: IndexSetting, rows: int, seed: int = 0) -> Array:
    shape = (rows, setting.group, setting.dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return to_array(query.to(setting.dtype))


def _select(index: Index, setting: IndexSetting, budgets: list[int], seed: int = 0) -> Selection:
    return index.select(_query(setting, len(budgets), seed), _ids(budgets))


def _rows(selection: Selection) -> list[list[int]]:
    starts = selection.row_ptr.tolist()
    return [selection.ids[first:last].tolist() for first, last in pairwise(starts)]


def _frozen(selection: Selection) -> tuple[list[list[int]], list[float]]:
    """What stays when the index answers the next question."""
    return _rows(selection), selection.scores.tolist()
