"""What may be written: after how many requests, and how many bytes a day."""

from __future__ import annotations

from collections import Counter
from math import exp
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.admission import AdmitAfter, AdmitAll, EnduranceBudget
from tierstore.errors import ConfigError
from tierstore.testing.admissions import AdmissionTests

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.admission import Admission, Verdicts

KIB = 1 << 10
MIB = 1 << 20
DAY_S = 24 * 60 * 60
HOUR_S = 60 * 60


class TestAdmitAllKeepsTheContract(AdmissionTests):
    def make_admission(self) -> Admission:
        return AdmitAll()


class TestAdmitAfterKeepsTheContract(AdmissionTests):
    """The window ends within a call and between calls."""

    def make_admission(self) -> Admission:
        return AdmitAfter(3, window=7, seed=5)


class TestEnduranceBudgetKeepsTheContract(AdmissionTests):
    def make_admission(self) -> Admission:
        return EnduranceBudget("100MB", seed=5)


def test_a_policy_with_a_table_of_all_it_saw_breaks_the_contract() -> None:
    class Hoarder(AdmitAll):
        def __init__(self) -> None:
            self.seen: Counter[int] = Counter()

        def admit(self, fingerprints: object, sizes: object, now: float) -> Verdicts:
            self.seen.update(np.asarray(fingerprints).tolist())
            return np.ones(len(np.asarray(fingerprints)), np.bool_)

    class Suite(AdmissionTests):
        def make_admission(self) -> Admission:
            return Hoarder()

    with pytest.raises(AssertionError):
        Suite().test_memory_is_bounded()


def test_everything_is_admitted() -> None:
    verdicts = AdmitAll().admit(np.arange(5, dtype=np.uint64), np.full(5, 1 << 40), 0.0)
    assert verdicts.tolist() == [True] * 5


def offer(policy: Admission, *fingerprints: int) -> list[bool]:
    sizes = np.full(len(fingerprints), 4 * KIB)
    verdicts: list[bool] = policy.admit(np.array(fingerprints, np.uint64), sizes, 0.0).tolist()
    return verdicts


# After so many requests


def test_a_value_enters_at_its_nth_request_and_after() -> None:
    policy = AdmitAfter(3)
    assert offer(policy, 7) == [False]
    assert offer(policy, 7) == [False]
    assert offer(policy, 7) == [True]
    assert offer(policy, 7, 7) == [True, True]


def test_requests_within_one_call_count() -> None:
    assert offer(AdmitAfter(2), 1, 2, 1, 3, 1, 2) == [False, False, True, False, True, True]


def test_one_request_admits_everything() -> None:
    assert offer(AdmitAfter(1), 1, 2, 1) == [True, True, True]


def test_a_value_seen_in_the_window_before_is_remembered() -> None:
    """A sketch that is halved, or emptied, at the end of a window would have forgotten it."""
    policy = AdmitAfter(2, window=100)
    assert offer(policy, *range(100)) == [False] * 100
    assert offer(policy, *range(1000, 1099), 0) == [*[False] * 99, True]


def test_a_value_not_asked_for_in_two_windows_is_forgotten() -> None:
    policy = AdmitAfter(2, window=100)
    offer(policy, *range(100))
    offer(policy, *range(1000, 1200))
    assert offer(policy, 0) == [False]


def test_more_requests_than_a_counter_holds_are_still_enough() -> None:
    policy = AdmitAfter(255, window=10_000)
    assert offer(policy, *[9] * 600) == [False] * 254 + [True] * 346
    assert offer(policy, *[9] * 600) == [True] * 600


@given(
    st.lists(st.integers(0, 20), max_size=120),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_whoever_asked_often_enough_in_a_window_enters(
    asked: list[int], requests: int, window: int, seed: int
) -> None:
    """Collisions may admit early, and never refuse: counted here exactly, by position."""
    policy = AdmitAfter(requests, window, seed)
    verdicts = offer(policy, *asked)
    for at, value in enumerate(asked):
        recent = asked[max(0, at - window + 1) : at + 1].count(value)
        assert verdicts[at] or recent < requests


def test_few_values_enter_before_their_time() -> None:
    """Each of 4 rows has 4 to 8 counters for each request of a window, and 2 windows count.

    A value enters early if all 4 of its counters are in use; at the end of the second window a
    counter is in use with the probability 1 - exp(-2 * window / counters).
    """
    window, counters = 1 << 14, 1 << 16
    fingerprints = np.random.default_rng(1).integers(0, 1 << 63, 3 * window, np.uint64)
    policy = AdmitAfter(2, window, seed=2)
    verdicts = policy.admit(fingerprints, np.ones(3 * window, np.int64), 0.0)
    early = verdicts[2 * window :].mean()
    loads = (np.arange(window, 2 * window) + 0.5) / counters
    expected = np.mean([(1 - exp(-load)) ** 4 for load in loads])
    assert expected < 1 / 40
    assert early == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("step", [1, 1 << 8, 1 << 20, 1 << 44, 3 << 56])
def test_fingerprints_with_a_pattern_collide_no_more_than_random_ones(step: int) -> None:
    count = 1 << 14
    fingerprints = np.arange(count, dtype=np.uint64) * np.uint64(step)
    distinct = len(np.unique(fingerprints))
    verdicts = AdmitAfter(2, count, seed=3).admit(fingerprints, np.ones(count, np.int64), 0.0)
    assert verdicts.sum() - (count - distinct) < count / 40


def test_another_seed_has_other_collisions() -> None:
    fingerprints = np.random.default_rng(4).integers(0, 1 << 63, 4000, np.uint64)
    sizes = np.ones(4000, np.int64)
    early = [AdmitAfter(2, 4096, seed).admit(fingerprints, sizes, 0.0) for seed in range(2)]
    assert early[0].any()
    assert not np.array_equal(early[0], early[1])


def test_counters_take_32_to_64_bytes_for_each_request_of_the_window() -> None:
    for window in (1, 1000, 1024, 1025, 100_000):
        assert 32 <= AdmitAfter(2, window).nbytes / window <= 64


# So many bytes a day


def admitted_bytes(
    policy: EnduranceBudget, sizes: np.ndarray, clock: np.ndarray
) -> tuple[int, np.ndarray]:
    """Bytes admitted of values offered one at a time, and the verdicts."""
    verdicts = np.array(
        [
            policy.admit(np.zeros(1, np.uint64), sizes[i : i + 1], now)[0]
            for i, now in enumerate(clock.tolist())
        ]
    )
    return int(sizes[verdicts].sum()), verdicts


def test_a_load_within_the_budget_is_admitted_whole() -> None:
    """Half the budget, evenly, for two days."""
    clock = np.arange(0, 2 * DAY_S, 60.0)
    sizes = np.full(len(clock), 512 * KIB)
    policy = EnduranceBudget(2 * DAY_S // 60 * 512 * KIB)
    assert admitted_bytes(policy, sizes, clock)[1].all()


def test_half_an_hours_budget_at_once_is_admitted_whole() -> None:
    """Beyond that, values are turned away at random."""
    sizes, clock = np.full(960, KIB), np.zeros(960)
    _, verdicts = admitted_bytes(EnduranceBudget(24 * MIB), sizes, clock)
    assert verdicts[:512].all()
    assert not verdicts[512:].all()


@pytest.mark.parametrize("overload", [1.5, 4, 50])
def test_a_load_beyond_the_budget_is_cut_down_to_it(overload: float) -> None:
    """Two days of values of many sizes. The first hour's savings are written on top."""
    budget = 64 * MIB
    count = 6000
    clock = np.linspace(0, 2 * DAY_S, count)
    largest = int(2 * overload * 2 * budget / count)
    sizes = np.random.default_rng(7).integers(1, largest, count)
    written, verdicts = admitted_bytes(EnduranceBudget(budget, seed=8), sizes, clock)
    allowed = 2 * budget + budget / 24
    assert 0.97 * 2 * budget <= written <= allowed + sizes.max()
    assert not verdicts[: count // 2].all()


def test_the_budget_holds_in_any_stretch_of_time() -> None:
    """A night without load earns an hour, and not a night, for the morning."""
    budget, step = 64 * MIB, 10.0
    clock = np.concatenate([np.arange(0, 8 * HOUR_S, step), np.arange(20, 28, step / 3600) * 3600])
    sizes = np.full(len(clock), 64 * KIB)
    written, verdicts = admitted_bytes(EnduranceBudget(budget, seed=9), sizes, clock)
    morning = int(sizes[verdicts & (clock >= 20 * HOUR_S)].sum())
    assert morning <= budget * 8 / 24 + budget / 24 + 64 * KIB
    assert morning >= budget * 8 / 24
    assert written <= budget * 16 / 24 + 2 * budget / 24 + 64 * KIB


def test_larger_values_are_rejected_first() -> None:
    """Values of 16 and 128 KiB in turn, ten times the budget of them together.

    With their mean, m = 72 KiB, as the unit, shares p(16 KiB) and p(128 KiB) are powers of one
    number to the exponents 16 / 72 and 128 / 72.
    """
    count = 8000
    sizes = np.where(np.arange(count) % 2, 16 * KIB, 128 * KIB)
    budget = int(sizes.sum()) // 10
    clock = np.linspace(0, DAY_S, count)
    _, verdicts = admitted_bytes(EnduranceBudget(budget, seed=10), sizes, clock)
    later = np.arange(count) > count // 4
    small = verdicts[later & (sizes == 16 * KIB)].mean()
    large = verdicts[later & (sizes == 128 * KIB)].mean()
    assert large == pytest.approx(small**8, rel=0.35)
    assert large < small / 4


def test_rejection_is_spread_over_time() -> None:
    """Four times the budget: each hour of the day gets about its share, the first a bit more."""
    clock = np.arange(0, DAY_S, 6.0)
    sizes = np.full(len(clock), 4 * KIB)
    budget = int(sizes.sum()) // 4
    _, verdicts = admitted_bytes(EnduranceBudget(budget, seed=11), sizes, clock)
    hours = verdicts.reshape(24, -1).mean(axis=1)
    assert hours[0] > 0.3
    assert hours[3:] == pytest.approx(np.full(21, 0.25), abs=0.07)


def test_a_clock_that_stands_still_earns_nothing() -> None:
    policy = EnduranceBudget(24 * MIB, seed=12)
    written, _ = admitted_bytes(policy, np.full(5000, 4 * KIB), np.full(5000, 3.0))
    assert written <= MIB + 4 * KIB
    assert admitted_bytes(policy, np.full(500, 4 * KIB), np.full(500, 3.0))[0] <= 64 * KIB


def spent(budget: int) -> EnduranceBudget:
    """A policy whose savings are used up, at the time 1e6."""
    policy = EnduranceBudget(budget)
    one = np.ones(1, np.int64)
    assert policy.admit(one.astype(np.uint64), one * budget // 24, 1e6).all()
    assert not policy.admit(one.astype(np.uint64), one, 1e6).any()
    return policy


@pytest.mark.parametrize("jump", [-1e5, -1.0, -float("inf"), float("nan"), float("inf")])
def test_a_clock_that_jumps_back_or_is_no_number_earns_nothing(jump: float) -> None:
    policy = spent(24 * MIB)
    assert admitted_bytes(policy, np.full(50, KIB), np.full(50, 1e6 + jump))[0] == 0


@pytest.mark.parametrize("jump", [-1e5, float("nan"), float("inf")])
def test_after_a_jump_time_goes_on_from_there(jump: float) -> None:
    """A quarter of an hour later, a quarter of an hour's budget has been earned."""
    policy = spent(24 * MIB)
    admitted_bytes(policy, np.full(1, KIB), np.full(1, 1e6 + jump))
    back = 1e6 + jump if jump < 0 else 1e6
    written, _ = admitted_bytes(policy, np.full(4000, KIB), np.full(4000, back + HOUR_S / 4))
    assert 200 * KIB <= written <= 256 * KIB + KIB


def test_a_jump_forward_earns_an_hour_at_most() -> None:
    policy = spent(24 * MIB)
    written, _ = admitted_bytes(policy, np.full(9000, KIB), np.full(9000, 1e15))
    assert 0.8 * MIB <= written <= MIB + KIB


def test_a_value_larger_than_the_savings_enters_and_is_repaid() -> None:
    """One of 10 hours' budget: then nothing for at least 9 hours."""
    policy = EnduranceBudget(24 * MIB)
    one = np.ones(1, np.uint64)
    assert policy.admit(one, np.array([10 * MIB]), 0.0).tolist() == [True]
    clock = np.arange(0, 12 * HOUR_S, 60.0)
    _, verdicts = admitted_bytes(policy, np.full(len(clock), KIB), clock)
    assert not verdicts[clock <= 9 * HOUR_S].any()
    assert verdicts[clock >= 11 * HOUR_S].all()


def test_an_empty_value_costs_nothing() -> None:
    policy = spent(24 * MIB)
    assert policy.admit(np.ones(2, np.uint64), np.array([0, 1]), 1e6).tolist() == [True, False]


def test_a_budget_may_be_written_with_its_unit() -> None:
    assert EnduranceBudget("500GB").bytes_per_day == 500_000_000_000


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        (AdmitAfter, (0,), "requests=0: expected a whole number from 1 to 255"),
        (AdmitAfter, (256,), "requests=256: expected a whole number from 1 to 255"),
        (AdmitAfter, (2.0,), r"requests=2\.0: expected a whole number from 1 to 255"),
        (AdmitAfter, (True,), "requests=True: expected a whole number from 1 to 255"),
        (AdmitAfter, (2, 0), "window=0: expected a whole number from 1 to 268435456"),
        (AdmitAfter, (2, 1 << 29), "window=536870912: expected a whole number"),
        (AdmitAfter, (2, 10, -1), "seed=-1: expected a whole number from 0"),
        (EnduranceBudget, (0,), "bytes_per_day=0: expected more than zero bytes"),
        (EnduranceBudget, (-5,), "bytes_per_day=-5: expected more than zero bytes"),
        (EnduranceBudget, (1.5,), r"bytes_per_day=1\.5: expected bytes as an int"),
        (EnduranceBudget, ("1GB/day",), "bytes_per_day='1GB/day': expected a number"),
        (EnduranceBudget, ("1GB", None), "seed=None: expected a whole number"),
    ],
)
def test_bad_arguments_are_named(
    policy: Callable[..., Admission], arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        policy(*arguments)
