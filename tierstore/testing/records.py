"""What every tier of records must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import RecordTier

MAX_VALUE_BYTES = 10_000
KEYS = [
    b"\x00",
    b"k",
    b"k\x00",
    b" ",
    b"\r\n",
    b"{a}b",
    b"*?[",
    "é".encode(),
    bytes(511),
    b"z" * 511,
]
"""Of one and of 511 bytes, and with what protocols and patterns treat in their own way."""
_numbers = count()
_calls = st.lists(
    st.dictionaries(st.sampled_from(KEYS), st.none() | st.binary(max_size=40), max_size=5),
    max_size=6,
)
"""Batches of keys and values; None removes."""


class RecordTierTests(ABC):
    """Inherit, and make the tier. It must not have lost a record that a test has just written."""

    @abstractmethod
    def make_tier(self, namespace: bytes, max_value_bytes: int) -> RecordTier:
        """A tier that sees the records of `namespace`, 16 bytes, and takes values so long."""

    @pytest.fixture
    def namespace(self) -> bytes:
        return b"test %011d" % next(_numbers)

    @pytest.fixture
    def tier(self, namespace: bytes) -> Iterator[RecordTier]:
        tier = self.make_tier(namespace, MAX_VALUE_BYTES)
        yield tier
        tier.close()

    def test_a_new_namespace_is_empty(self, tier: RecordTier) -> None:
        assert tier.read(KEYS) == [None] * len(KEYS)
        assert not tier.contains(KEYS).any()
        assert not tier.remove(KEYS).any()
        assert (tier.damaged, tier.refused) == (0, 0)
        assert tier.name
        assert tier.medium

    def test_values_come_back_under_their_keys(self, tier: RecordTier) -> None:
        values = [bytes([i]) * (i * 1000) for i in range(len(KEYS))]
        assert tier.write(KEYS, values).all()
        assert tier.read(KEYS[::-1]) == values[::-1]
        assert tier.read([KEYS[3], b"unknown", KEYS[3]]) == [values[3], None, values[3]]
        assert tier.contains([b"unknown", KEYS[3]]).tolist() == [False, True]

    def test_many_records_are_one_call(self, tier: RecordTier) -> None:
        keys = [b"%d" % i for i in range(1500)]
        values = [np.random.default_rng(i).bytes(i) for i in range(1500)]
        assert tier.write(keys, values).tolist() == [True] * 1500
        assert tier.read(keys) == values
        assert tier.contains(keys).all()
        assert tier.remove(keys).all()
        assert tier.read(keys) == [None] * 1500

    def test_nothing_is_a_batch_too(self, tier: RecordTier) -> None:
        assert tier.read([]) == []
        assert tier.write([], []).shape == (0,)
        assert tier.remove([]).shape == tier.contains([]).shape == (0,)

    def test_a_later_value_takes_the_place_of_an_earlier_one(self, tier: RecordTier) -> None:
        tier.write([b"a", b"b"], [b"old", b"other"])
        tier.write([b"a"], [b""])
        assert tier.read([b"a", b"b"]) == [b"", b"other"]

    def test_of_equal_keys_in_one_call_the_last_counts(self, tier: RecordTier) -> None:
        assert tier.write([b"a", b"b", b"a"], [b"1", b"2", b"3"]).tolist() == [True] * 3
        assert tier.read([b"a", b"b"]) == [b"3", b"2"]

    def test_a_value_that_is_too_long_is_refused_alone(self, tier: RecordTier) -> None:
        values = [bytes(MAX_VALUE_BYTES), bytes(MAX_VALUE_BYTES + 1), b"short"]
        assert tier.max_value_bytes == MAX_VALUE_BYTES
        assert tier.write([b"a", b"b", b"c"], values).tolist() == [True, False, True]
        assert tier.read([b"a", b"b", b"c"]) == [values[0], None, values[2]]
        assert tier.refused == 1

    def test_anything_with_bytes_is_a_value(self, tier: RecordTier) -> None:
        words = np.arange(5, dtype=np.uint32)
        values: list[Any] = [bytearray(b"abc"), memoryview(b"abcd")[1:], words]
        assert tier.write([b"a", b"b", b"c"], values).all()
        assert tier.read([b"a", b"b", b"c"]) == [b"abc", b"bcd", words.tobytes()]

    def test_removed_records_are_gone(self, tier: RecordTier) -> None:
        tier.write([b"a", b"b"], [b"1", b"2"])
        assert tier.remove([b"a", b"c"]).tolist() == [True, False]
        assert tier.read([b"a", b"b"]) == [None, b"2"]
        assert tier.contains([b"a", b"b"]).tolist() == [False, True]

    def test_clearing_empties_the_namespace_alone(self, tier: RecordTier, namespace: bytes) -> None:
        other = self.make_tier(b"quite another   ", MAX_VALUE_BYTES)
        other.write([b"a"], [b"1"])
        keys = [*KEYS, *(b"%d" % i for i in range(1200))]
        tier.write(keys, [b"value"] * len(keys))
        self.make_tier(namespace, MAX_VALUE_BYTES).clear()
        assert not tier.contains(keys).any()
        assert other.read([b"a"]) == [b"1"]
        other.clear()
        other.close()

    def test_machines_share_a_namespace(self, tier: RecordTier, namespace: bytes) -> None:
        other = self.make_tier(namespace, MAX_VALUE_BYTES)
        tier.write([b"a"], [b"from the first"])
        assert other.read([b"a"]) == [b"from the first"]
        other.write([b"a"], [b"from the second"])
        other.close()
        assert tier.read([b"a"]) == [b"from the second"]

    def test_namespaces_are_worlds_apart(self, tier: RecordTier) -> None:
        other = self.make_tier(b"quite another   ", MAX_VALUE_BYTES)
        tier.write([b"a"], [b"1"])
        assert not other.remove([b"a"]).any()
        other.write([b"a"], [b"2"])
        assert tier.read([b"a"]) == [b"1"]
        other.remove([b"a"])
        other.close()
        assert tier.read([b"a"]) == [b"1"]

    def test_records_outlive_the_tier_that_wrote_them(self, namespace: bytes) -> None:
        first = self.make_tier(namespace, MAX_VALUE_BYTES)
        first.write([b"a"], [b"1"])
        first.close()
        first.close()
        second = self.make_tier(namespace, MAX_VALUE_BYTES)
        assert second.read([b"a"]) == [b"1"]
        second.close()

    @pytest.mark.parametrize("key", [b"", bytes(512)], ids=["empty", "of 512 bytes"])
    def test_a_key_of_another_length_is_refused(self, tier: RecordTier, key: bytes) -> None:
        with pytest.raises(ConfigError, match=f"key of {len(key)} bytes: expected 1 to 511"):
            tier.write([b"a", key], [b"1", b"2"])
        for call in (tier.read, tier.contains, tier.remove):
            with pytest.raises(ConfigError, match=f"key of {len(key)} bytes"):
                call([b"a", key])
        assert tier.read([b"a"]) == [None]

    def test_every_key_needs_a_value(self, tier: RecordTier) -> None:
        with pytest.raises(ConfigError, match="2 keys and 1 values"):
            tier.write([b"a", b"b"], [b"1"])
        assert tier.read([b"a"]) == [None]

    def test_threads_may_call_at_once(self, tier: RecordTier) -> None:
        def use(thread: int) -> bool:
            keys = [b"%d of %d" % (i, thread) for i in range(50)]
            return bool(tier.write(keys, keys).all()) and tier.read(keys) == keys

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(use, range(6))) == [True] * 6

    @law
    @given(_calls)
    def test_a_read_sees_what_was_written_last(
        self, calls: list[dict[bytes, bytes | None]]
    ) -> None:
        tier = self.make_tier(b"test %011d" % next(_numbers), MAX_VALUE_BYTES)
        model: dict[bytes, bytes] = {}
        for call in calls:
            written = {key: value for key, value in call.items() if value is not None}
            gone = [key for key in call if key not in written]
            tier.write(list(written), list(written.values()))
            assert tier.remove(gone).tolist() == [key in model for key in gone]
            model = {k: v for k, v in (model | written).items() if k not in gone}
            assert tier.read(KEYS) == [model.get(key) for key in KEYS]
            assert tier.contains(KEYS).tolist() == [key in model for key in KEYS]
        tier.close()
