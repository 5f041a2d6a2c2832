"""What every keyed store must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.testing.laws import law

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


KEYS = [b"a", b"b\0", b"b\0\0", b"\xff" * 47, b"c" * 48, b"c" * 49, b"d" * 100, b"e" * 511]
SIZES = [0, 1, 100, 4095, 4096, 4097, 12_000]


class Store(Protocol):
    """What `KeyedStoreTests` uses of a store."""

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Store values; which of them are readable now."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key; None for a miss."""

    def contains_many(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which keys have a value."""

    def delete_many(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Remove values; which of them were there."""

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys that begin with a prefix."""

    def sync(self) -> None:
        """Make everything survive a power loss."""

    def clear(self) -> None:
        """Remove everything."""

    def close(self) -> None:
        """End the use of the store; a second call does nothing."""


def content(seed: int, size: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(seed).bytes(size)


keys_of_a_call = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
steps = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "get", "clear", "reopen"]), keys_of_a_call),
    max_size=20,
)


class KeyedStoreTests(ABC):
    """Inherit, and make the store. It must have room for 64 values of 16 KiB, and not lose them."""

    @abstractmethod
    def make_store(self, folder: Path) -> Store:
        """The store of a directory, which a test has closed before it makes it again."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert store.get_many(KEYS) == [None] * len(KEYS)
        assert not store.contains_many(KEYS).any()
        assert not store.delete_many(KEYS).any()
        assert list(store.keys()) == []

    @pytest.mark.parametrize("size", SIZES)
    def test_values_come_back_under_their_keys(self, store: Store, size: int) -> None:
        values = [content(i, size) for i in range(len(KEYS))]
        assert store.put_many(KEYS, values).all()
        assert store.get_many(KEYS[::-1]) == values[::-1]
        assert store.contains_many(KEYS).all()
        assert sorted(store.keys()) == sorted(KEYS)

    def test_keys_that_begin_alike_are_apart(self, store: Store) -> None:
        keys = [b"k" * n for n in range(1, 64)]
        values = [bytes([n]) for n in range(63)]
        assert store.put_many(keys, values).all()
        assert store.get_many(keys) == values
        assert sorted(store.keys(b"k" * 60)) == keys[59:]
        assert list(store.keys(b"kl")) == []

    def test_nothing_is_a_batch_too(self, store: Store) -> None:
        assert store.get_many([]) == []
        assert store.put_many([], []).shape == (0,)
        assert store.contains_many([]).shape == store.delete_many([]).shape == (0,)

    def test_of_equal_keys_in_one_call_the_last_counts(self, store: Store) -> None:
        assert store.put_many([b"a", b"b", b"a"], [b"1", b"2", b"3"]).tolist() == [True] * 3
        assert store.get_many([b"a", b"b"]) == [b"3", b"2"]

    def test_a_later_value_takes_the_place_of_an_earlier_one(self, store: Store) -> None:
        store.put_many([b"a", b"b"], [content(0, 9000), b"other"])
        store.put_many([b"a"], [b""])
        assert store.get_many([b"a", b"b"]) == [b"", b"other"]
        assert sorted(store.keys()) == [b"a", b"b"]

    def test_deleted_values_are_gone(self, store: Store) -> None:
        store.put_many([b"a", b"b"], [b"1", b"2"])
        assert store.delete_many([b"a", b"c"]).tolist() == [True, False]
        assert store.get_many([b"a", b"b"]) == [None, b"2"]
        assert not store.delete_many([b"a"]).any()

    def test_a_cleared_store_is_empty_and_of_use(self, store: Store) -> None:
        store.put_many(KEYS, KEYS)
        store.clear()
        assert store.get_many(KEYS) == [None] * len(KEYS)
        assert list(store.keys()) == []
        assert store.put_many([b"a"], [b"new"]).all()
        assert store.get_many([b"a"]) == [b"new"]

    def test_what_was_put_stays_when_the_caller_changes_its_buffer(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put_many([b"a"], [memoryview(buffer)])  # type: ignore[list-item]
        buffer[:] = b"after!"
        assert store.get_many([b"a"]) == [b"before"]

    def test_values_and_removals_outlive_the_store(self, tmp_path: Path) -> None:
        first = self.make_store(tmp_path / "store")
        values = [content(i, 5000) for i in range(len(KEYS))]
        first.put_many(KEYS, values)
        first.delete_many(KEYS[:1])
        first.sync()
        first.close()
        first.close()
        second = self.make_store(tmp_path / "store")
        assert second.get_many(KEYS) == [None, *values[1:]]
        second.clear()
        second.close()
        third = self.make_store(tmp_path / "store")
        assert list(third.keys()) == []
        third.close()

    @pytest.mark.parametrize("key", [b"", bytes(512)], ids=["empty", "of 512 bytes"])
    def test_a_key_of_another_length_is_refused(self, store: Store, key: bytes) -> None:
        with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
            store.put_many([b"a", key], [b"1", b"2"])
        for call in (store.get_many, store.contains_many, store.delete_many):
            with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
                call([b"a", key])
        assert store.get_many([b"a"]) == [None]

    def test_every_key_needs_a_value(self, store: Store) -> None:
        with pytest.raises(ValueError, match="2 keys and 1 values"):
            store.put_many([b"a", b"b"], [b"1"])
        assert store.get_many([b"a"]) == [None]

    @law
    @given(steps)
    def test_it_is_a_dictionary(self, calls: list[tuple[str, list[bytes]]]) -> None:
        with TemporaryDirectory() as folder:
            store, model = self.make_store(Path(folder) / "store"), dict[bytes, bytes]()
            for number, (name, keys) in enumerate(calls):
                if name == "put":
                    values = [content(number + i, SIZES[i]) for i in range(len(keys))]
                    assert store.put_many(keys, values).all()
                    model |= dict(zip(keys, values, strict=True))
                elif name == "delete":
                    expected = [key in model for key in keys]
                    assert store.delete_many(keys).tolist() == expected
                    model = {k: v for k, v in model.items() if k not in keys}
                elif name == "clear":
                    store.clear()
                    model = {}
                elif name == "reopen":
                    store.close()
                    store = self.make_store(Path(folder) / "store")
                assert store.get_many(keys) == [model.get(key) for key in keys]
                assert sorted(store.keys()) == sorted(model)
            store.close()
