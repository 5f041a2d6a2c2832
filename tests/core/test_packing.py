"""Arrays that become bytes and arrays again, or nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tierstore.packing import pack_arrays, unpack_arrays

if TYPE_CHECKING:
    import numpy.typing as npt

KINDS = st.sampled_from([np.dtype(kind) for kind in ("?", "<i4", "<u2", "<i8", "<f4", "<U7")])


@given(
    st.dictionaries(
        st.text(max_size=9),
        KINDS.flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
        ),
        max_size=4,
    )
)
def test_arrays_come_back_as_they_were(named: dict[str, npt.NDArray[Any]]) -> None:
    found = unpack_arrays(pack_arrays(named))
    assert found is not None
    assert list(found) == list(named)
    for name, array in named.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


PACKED = pack_arrays({"a": np.arange(5), "kind": np.array("an index")})


@given(st.binary(max_size=80) | st.integers(0, len(PACKED) - 1).map(lambda end: PACKED[:end]))
def test_other_bytes_are_nothing(data: bytes) -> None:
    assert unpack_arrays(data) is None
    assert unpack_arrays(PACKED + b"\0") is None


@given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
@example(16, 16)
def test_changed_bytes_are_arrays_or_nothing(position: int, change: int) -> None:
    data = bytearray(PACKED)
    data[position] ^= change
    found = unpack_arrays(bytes(data))
    assert found is None or all(isinstance(array, np.ndarray) for array in found.values())


@given(st.text(max_size=5) | st.from_regex(r"[<>|=,][biufUOVS,][0-9]*", fullmatch=True))
@example(",i8")
@example("<U999999999")
@example("<U99999999999999999999")
@example("(2,)i4")
def test_any_text_for_a_type_is_arrays_or_nothing(kind: str) -> None:
    check_head([("a", kind, [5])])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(JSON | st.lists(st.tuples(JSON, st.sampled_from(["<i8", "<U2"]), JSON), max_size=2))
@example([("a", "<i8", [2**70])])
@example([("a", "<i8", [-1]), ("b", "<i8", [6])])
@example([(7, "<i8", [5])])
def test_any_head_is_arrays_or_nothing(head: object) -> None:
    check_head(head)


def check_head(head: object) -> None:
    text = json.dumps(head).encode()
    found = unpack_arrays(len(text).to_bytes(8, "little") + text + bytes(40))
    if found is not None:
        assert all(isinstance(name, str) for name in found)
        assert sum(array.nbytes for array in found.values()) == 40


def test_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="expected numbers or text"):
        pack_arrays({"a": np.array([object()])})
