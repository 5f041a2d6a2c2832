"""The checker of concurrent reads accepts what can be and nothing else."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.testing import History

if TYPE_CHECKING:
    from tierstore.testing.history import Operation


def put(history: History, key: str, value: int) -> None:
    with history.put(key, value):
        pass


def get(history: History, key: str, value: int | None) -> None:
    with history.get(key) as got:
        got.value = value


def is_right(history: History) -> bool:
    try:
        history.check()
    except AssertionError:
        return False
    return True


def test_the_last_value_and_a_miss_are_right() -> None:
    history = History()
    put(history, "a", 1)
    put(history, "a", 2)
    get(history, "a", 2)
    get(history, "a", None)
    get(history, "b", None)
    history.check()
    assert history.counts == {"put": 2, "hit": 1, "miss": 2}


def test_a_stale_value_is_wrong() -> None:
    history = History()
    put(history, "a", 1)
    put(history, "a", 2)
    get(history, "a", 1)
    with pytest.raises(AssertionError, match=r"(?s)1 of 1 values.*key 'a': get 1 \[5, 6\]"):
        history.check()


@pytest.mark.parametrize("value", [2, 3])
def test_a_foreign_value_is_wrong(value: int) -> None:
    """Of another key, or of none."""
    history = History()
    put(history, "a", 1)
    put(history, "b", 2)
    get(history, "a", value)
    assert not is_right(history)


def test_a_deleted_value_is_wrong() -> None:
    history = History()
    put(history, "a", 1)
    with history.delete("a"):
        get(history, "a", 1)
    assert is_right(history)
    get(history, "a", 1)
    assert not is_right(history)


def test_either_value_is_right_while_a_put_runs() -> None:
    history = History()
    put(history, "a", 1)
    with history.put("a", 2):
        for value in (1, 2, 1):
            get(history, "a", value)
    get(history, "a", 2)
    history.check()
    get(history, "a", 1)
    assert not is_right(history)


def test_a_get_may_see_what_was_there_at_any_time_while_it_ran() -> None:
    history = History()
    put(history, "a", 1)
    with history.get("a") as early, history.get("a") as late, history.get("a") as never:
        put(history, "a", 2)
        put(history, "a", 3)
        early.value, late.value, never.value = 1, 3, None
    history.check()
    with history.get("a") as got:
        got.value = 2
    assert not is_right(history)


def test_a_long_get_makes_nothing_right_for_later_ones() -> None:
    """What the long one may still see is remembered, and is stale for the others."""
    for stale in (1, 2):
        history = History()
        put(history, "a", 1)
        with history.get("a") as long:
            with history.put("a", 2) as refused:
                refused.is_refused = True
            put(history, "a", 3)
            get(history, "a", 3)
            assert is_right(history)
            get(history, "a", stale)
            long.value = stale
        with pytest.raises(AssertionError, match="1 of 3 values"):
            history.check()


def test_a_refused_value_is_wrong_for_later_gets_while_a_long_one_runs() -> None:
    history = History()
    with history.get("a"):
        with history.put("a", 1) as refused:
            refused.is_refused = True
        get(history, "a", 1)
    assert not is_right(history)


def test_puts_that_overlap_end_in_either_order() -> None:
    for last in (1, 2):
        history = History()
        with history.put("a", 1), history.put("a", 2):
            pass
        get(history, "a", last)
        history.check()


def test_a_value_of_the_future_is_wrong() -> None:
    history = History()
    get(history, "a", 1)
    put(history, "a", 1)
    assert not is_right(history)


def test_a_refused_put_is_not_seen_later_and_replaces_nothing() -> None:
    history = History()
    put(history, "a", 1)
    with history.get("a") as got:
        with history.put("a", 2) as refused:
            refused.is_refused = True
        got.value = 2
    get(history, "a", 1)
    assert is_right(history)
    assert history.counts["refused"] == 1
    get(history, "a", 2)
    assert not is_right(history)


def test_an_operation_that_raised_may_have_happened_or_not() -> None:
    history = History()
    put(history, "a", 1)
    with pytest.raises(OSError, match="disk"), history.put("a", 2):
        raise OSError("disk")
    with pytest.raises(OSError, match="disk"), history.get("a"):
        raise OSError("disk")
    for value in (1, 2):
        get(history, "a", value)
    history.check()
    put(history, "a", 3)
    get(history, "a", 2)
    assert not is_right(history)
    assert history.counts["failed"] == 1


def test_a_value_that_stands_for_a_miss_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a value"):
        History().put("a", None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "delete", "get"]),
            st.integers(0, 40),
            st.integers(1, 12),
            st.integers(0, 6),
        ),
        max_size=14,
    )
)
def test_it_agrees_with_the_definition(calls: list[tuple[str, int, int, int]]) -> None:
    """Calls with overlapping lives, judged again from the complete record."""
    history = History()
    edges: list[tuple[int, bool, int]] = []
    operations: list[Operation] = []
    for number, (kind, begin, life, value) in enumerate(calls):
        edges += [(begin, False, number), (begin + life, True, number)]
        operations.append(getattr(history, kind)("a", *[number] * (kind == "put")))
        operations[-1].value = number if kind == "put" else value
    spans: list[list[int]] = [[] for _ in calls]
    for moment, (_, is_end, number) in enumerate(sorted(edges)):
        spans[number].append(moment)
        if is_end:
            operations[number].__exit__(None, None, None)
        else:
            operations[number].__enter__()
    kinds = [kind for kind, _, _, _ in calls]
    writes = [span for kind, span in zip(kinds, spans, strict=True) if kind != "get"]

    def is_possible(get: list[int], value: int) -> bool:
        if value >= len(calls) or kinds[value] != "put":
            return False
        put = spans[value]
        return put[0] < get[1] and not any(put[1] < w[0] and w[1] < get[0] for w in writes)

    gets = [n for n, kind in enumerate(kinds) if kind == "get"]
    expected = all(is_possible(spans[n], calls[n][3]) for n in gets)
    assert is_right(history) == expected


def test_threads_on_a_right_store_are_right_and_leave_little_behind() -> None:
    history, store, lock = History(), dict[int, int](), threading.Lock()
    largest = []

    def work(thread: int) -> None:
        for number in range(2000):
            key, value = (number * 7 + thread) % 50, thread * 10_000 + number
            with history.put(key, value), lock:
                store[key] = value
            with history.get(key * 3 % 50) as got, lock:
                got.value = store.get(key * 3 % 50)
            if number % 5 == 0:
                with history.delete(key), lock:
                    store.pop(key, None)
        largest.append(history.size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history.check()
    assert history.counts["put"] == history.counts["hit"] + history.counts["miss"] == 16_000
    assert history.counts["delete"] == 3_200
    assert max(largest) < 50 * 16


def test_threads_on_a_store_with_a_stale_copy_are_found_out() -> None:
    """The store answers from a copy that is one put old."""
    history, store = History(), dict[int, list[int]]()
    for number in range(100):
        with history.put(number % 3, number):
            store.setdefault(number % 3, []).append(number)
        with history.get(number % 3) as got:
            versions = store[number % 3]
            got.value = versions[-2] if number == 70 else versions[-1]
    assert all(older < newer for older, newer in pairwise(store[1]))
    with pytest.raises(AssertionError, match="1 of 100 values"):
        history.check()
