"""What every admission policy must do."""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.testing.laws import law

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.admission import Admission

MANY = 10_000
"""Values offered in a test of memory, twice."""

MOST_GROWTH_BYTES = 64 << 10


class Offer(NamedTuple):
    """Values offered in one call: (fingerprint, bytes) pairs, and the clock."""

    values: Sequence[tuple[int, int]]
    now: float


values = st.tuples(st.integers(0, 12), st.integers(0, 4 << 20))
"""Few fingerprints, so that values are offered again."""

clocks = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e18, -1e18])
"""They stand still, and jump either way."""

histories = st.lists(st.builds(Offer, st.lists(values, max_size=9), clocks), max_size=12)


def ask(policy: Admission, offer: Offer) -> list[bool]:
    """The answers to an offer, which must have the promised type and shape."""
    fingerprints = np.array([value for value, _ in offer.values], np.uint64)
    sizes = np.array([size for _, size in offer.values], np.int64)
    before = fingerprints.copy(), sizes.copy()
    answer = policy.admit(fingerprints, sizes, offer.now)
    assert isinstance(answer, np.ndarray)
    assert answer.dtype == np.bool_
    assert answer.shape == (len(offer.values),)
    assert np.array_equal(fingerprints, before[0]), "admit changed its argument"
    assert np.array_equal(sizes, before[1]), "admit changed its argument"
    verdicts: list[bool] = answer.tolist()
    return verdicts


class AdmissionTests(ABC):
    """Inherit, and make the policy."""

    @abstractmethod
    def make_admission(self) -> Admission:
        """A new policy; each call makes an equal one (the same seed, say)."""

    @law
    @given(histories)
    def test_the_same_history_has_the_same_answers(self, history: list[Offer]) -> None:
        first, second = self.make_admission(), self.make_admission()
        assert [ask(first, offer) for offer in history] == [ask(second, offer) for offer in history]

    @law
    @given(histories)
    def test_one_call_is_as_good_as_many(self, history: list[Offer]) -> None:
        together, alone = self.make_admission(), self.make_admission()
        for offer in history:
            one_by_one = [ask(alone, Offer([value], offer.now))[0] for value in offer.values]
            assert ask(together, offer) == one_by_one

    @pytest.mark.parametrize("size", [0, 1, 1 << 40])
    def test_any_size_has_an_answer(self, size: int) -> None:
        policy = self.make_admission()
        assert len(ask(policy, Offer([(1, size), ((1 << 64) - 1, size)], 0.0))) == 2

    def test_memory_is_bounded(self) -> None:
        """Ever new values leave nothing behind once the policy has its full size."""
        policy, random = self.make_admission(), np.random.default_rng(0)
        sizes = np.full(MANY, 4096, np.int64)
        fingerprints = random.integers(0, 1 << 63, (2, MANY), np.uint64)
        tracemalloc.start()
        try:
            policy.admit(fingerprints[0], sizes, 0.0)
            before = tracemalloc.get_traced_memory()[0]
            policy.admit(fingerprints[1], sizes, 1.0)
            after = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert after - before < MOST_GROWTH_BYTES
