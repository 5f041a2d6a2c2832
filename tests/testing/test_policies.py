"""The suite for policies notices what is wrong, and its cache does what the papers say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tierstore.errors import PolicyError
from tierstore.kernels.jit import part
from tierstore.policies import (
    EWMA,
    FIFO,
    LRFU,
    LRU,
    S3FIFO,
    SIEVE,
    BlockStats,
    EwmaUse,
    Lookahead,
    QueueLRU,
    Random,
    RankedPolicy,
)
from tierstore.policies.queues import lists
from tierstore.policies.replay import POLICIES
from tierstore.testing import PolicyTests, QueuePolicyTests, assert_distinct
from tierstore.testing.distinct import sieve_turns
from tierstore.testing.policy_cache import PolicyCache, fewest_misses, next_uses
from tierstore.testing.policy_traces import skewed
from tierstore.testing.policy_work import in_python
from tierstore.traces.generators import loop, phase_shift

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Access, Demand, Ids
    from tierstore.policies.ranked import Rank

ROOT = Path(__file__).parents[2]
ANOMALY = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]


# The cache and what is best


@pytest.mark.parametrize(("capacity", "misses"), [(3, 9), (4, 10)])
def test_fifo_may_miss_more_with_more_room(capacity: int, misses: int) -> None:
    """Belady's anomaly: the textbook's trace and counts."""
    cache = PolicyCache(FIFO(), 6, capacity)
    assert cache.run(ANOMALY).hits.count(False) == misses


def test_the_cache_evicts_as_lru_does_by_hand() -> None:
    cache = PolicyCache(QueueLRU(), 6, 3)
    assert cache.run([0, 1, 2, 0, 3, 1]).evicted == [1, 2]
    assert cache.residents == [0, 3, 1]


def test_pinned_and_used_blocks_may_not_leave() -> None:
    cache = PolicyCache(LRU(), 6, 3)
    cache.run([0, 1, 2])
    cache.pinned.add(0)
    assert cache.request([1, 3]) == [True, False]
    assert cache.evicted == [2]


def brute_force(trace: list[int], capacity: int, held: frozenset[int] = frozenset()) -> int:
    """Fewest misses by trying everything that may leave, or stay out."""
    if not trace:
        return 0
    key, rest = trace[0], trace[1:]
    if key in held:
        return brute_force(rest, capacity, held)
    if len(held) < capacity:
        return 1 + brute_force(rest, capacity, held | {key})
    return 1 + min(brute_force(rest, capacity, (held | {key}) - {out}) for out in held | {key})


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 3))
def test_the_best_choice_is_the_best_of_all(trace: list[int], capacity: int) -> None:
    assert fewest_misses(trace, capacity) == brute_force(trace, capacity)


def test_next_uses_are_positions() -> None:
    assert next_uses([5, 6, 5, 5, 7]) == [2, 5, 3, 5, 5]


# The guard


def test_shipped_queue_policies_are_told_apart() -> None:
    """LFU with ageing is GDSF where all blocks are equal, and so is `WorkloadAware`."""
    policies: dict[str, Any] = {
        name: make for name, make in POLICIES.items() if name not in ("gdsf", "workload")
    }
    trace = phase_shift().keys.tolist()
    shares = assert_distinct(policies, trace, 150)
    assert len(shares) == len(policies) * (len(policies) - 1) // 2


def test_shipped_ranked_policies_are_told_apart() -> None:
    trace = phase_shift(phases=3, requests=400, blocks=60, scan=20).keys.tolist()
    assert_distinct(
        {p.__name__: p for p in (LRU, Lookahead, EWMA, LRFU, EwmaUse, Random)}, trace, 10
    )


def test_a_trace_that_tells_nothing_apart_is_refused() -> None:
    trace = phase_shift().keys.tolist()
    policies: dict[str, Any] = {"lru": QueueLRU, "also lru": QueueLRU, "fifo": FIFO}
    with pytest.raises(AssertionError, match=r"tell apart lru and also lru \(0\.000%\): expected"):
        assert_distinct(policies, trace, 150)


def test_a_trace_too_short_for_sieve_is_refused() -> None:
    trace = phase_shift(phases=1, requests=500).keys.tolist()
    with pytest.raises(AssertionError, match=r"hand goes round \d times, 10 are expected"):
        assert_distinct({"sieve": SIEVE, "fifo": FIFO}, trace, 150)


def test_turns_of_the_hand_are_counted() -> None:
    """It passes over what was used; where nothing is, it stays at the old end."""
    assert sieve_turns(loop(100, 20).keys.tolist(), 10) == 0
    assert sieve_turns([0, 1, 0, 1, 2], 2) == 1
    assert sieve_turns([0, 1, 0, 1, 2, 1, 2, 3], 2) == 2


# Policies that are wrong


class Base(RankedPolicy):
    def rank(self, stats: BlockStats) -> Rank:
        return stats.last_used


class OneTooFew(Base):
    def victims(self, demand: Demand) -> Ids:
        return super().victims(demand)[:-1]


class Repeats(Base):
    def victims(self, demand: Demand) -> Ids:
        victims = super().victims(demand)
        victims[1:] = victims[:1]
        return victims


class TakesPinned(Base):
    def victims(self, demand: Demand) -> Ids:
        demand.eligible[:] = True
        return super().victims(demand)


class NeverRefuses(Base):
    def victims(self, demand: Demand) -> Ids:
        able = demand.residents[demand.eligible]
        return able[: int(demand.need.sum())]


class ChangesWhenAsked(Base):
    asked = 0

    def victims(self, demand: Demand) -> Ids:
        self.asked += 1
        return super().victims(demand)

    def rank(self, stats: BlockStats) -> Rank:
        return stats.last_used if self.asked % 2 else -stats.last_used


class GoesByNumber(Base):
    def rank(self, stats: BlockStats) -> Rank:
        return stats.handles


class Unseeded(Base):
    def rank(self, stats: BlockStats) -> Rank:
        return np.random.default_rng().random(len(stats.handles))


class HashesNames(Base):
    def rank(self, stats: BlockStats) -> Rank:
        return np.array([hash(f"block {handle}") for handle in stats.handles.tolist()])


class ForgetsWhenPickled(Base):
    """What was used most leaves first."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        for handle in access.handles.tolist():
            self._uses[handle] = self._uses.get(handle, 0) + 1

    def rank(self, stats: BlockStats) -> Rank:
        return np.array([-self._uses.get(handle, 0) for handle in stats.handles.tolist()])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_uses": {}}


class HashesNamesSuite(PolicyTests):
    """Not run as it is; at the top of a module, so that another process can import it."""

    def make_policy(self) -> HashesNames:
        return HashesNames()


WRONG: dict[str, list[type[RankedPolicy]]] = {
    "victims_are_as_many_as_needed_and_only_eligible": [OneTooFew, Repeats, TakesPinned],
    "too_few_eligible_residents_are_an_error": [NeverRefuses],
    "asking_for_victims_changes_nothing": [ChangesWhenAsked],
    "the_same_history_has_the_same_victims": [Unseeded],
    "numbers_of_blocks_do_not_matter": [GoesByNumber],
    "anything_may_happen_at_any_moment": [ChangesWhenAsked, NeverRefuses],
    "hits_of_a_smaller_cache_are_hits_of_a_larger_one": [Random],
    "a_policy_pickled_in_the_middle_goes_on_as_before": [ForgetsWhenPickled],
}


@pytest.fixture
def without_shrinking() -> Iterator[None]:
    """That the machine fails is enough here, and always or never; how is not of interest."""
    before = settings.get_current_profile_name()
    profile = settings(
        settings.get_profile(before), phases=[Phase.generate], derandomize=True, database=None
    )
    settings.register_profile("without shrinking", profile)
    settings.load_profile("without shrinking")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize(
    ("law", "policy"), [(law, policy) for law, wrong in WRONG.items() for policy in wrong]
)
@pytest.mark.usefixtures("without_shrinking")
def test_a_wrong_policy_breaks_a_law(law: str, policy: type[RankedPolicy]) -> None:
    class Suite(PolicyTests):
        is_stack = True

        def make_policy(self) -> RankedPolicy:
            return policy()

    with pytest.raises((AssertionError, PolicyError, ExceptionGroup, pytest.fail.Exception)):
        getattr(Suite(), f"test_{law}")()


def test_a_policy_that_hashes_names_is_caught() -> None:
    with pytest.raises(AssertionError):
        HashesNamesSuite().test_the_hash_seed_of_the_process_does_not_matter()


def test_a_suite_that_no_other_process_can_import_is_skipped() -> None:
    class Suite(PolicyTests):
        def make_policy(self) -> LRU:
            return LRU()

    with pytest.raises(pytest.skip.Exception, match="no other process can import"):
        Suite().test_the_hash_seed_of_the_process_does_not_matter()


class ForgetsGhosts(S3FIFO):
    """An eviction is no removal: ghosts should stay."""

    def on_evict(self, handles: Ids) -> None:
        super().on_evict(handles)
        self.on_remove(handles)


def test_a_store_that_decides_otherwise_than_a_replay_is_caught() -> None:
    class Suite(QueuePolicyTests):
        def make_policy(self) -> ForgetsGhosts:
            return ForgetsGhosts()

    law: Any = Suite.test_a_store_decides_as_a_replay_does
    with pytest.raises(AssertionError):
        law.hypothesis.inner_test(Suite(), skewed(0, 400), 5, 0)


@part
def looks_at_all(q: Any, d: Any) -> Any:  # noqa: ANN401 (Numba infers its types)
    victim = lists.oldest(q, d, 0)
    k = victim
    while k >= 0:
        k = q.node[k, lists.NEWER]
    lists.unlink(q, d, victim)
    return victim


@pytest.mark.parametrize(("evict", "grows"), [(None, False), (looks_at_all, True)])
def test_work_that_grows_with_the_capacity_is_seen(evict: object, grows: bool) -> None:
    class Suite(QueuePolicyTests):
        def make_policy(self) -> QueueLRU:
            policy: Any = QueueLRU()
            parts = {} if evict is None else {"evict": evict}
            policy.loops = type(policy.loops)(*(in_python(loop, parts) for loop in policy.loops))
            made: QueueLRU = policy
            return made

    assert (Suite()._work(200) > 1.6 * Suite()._work(20)) == grows


def document_blocks(opted_out: bool) -> list[str]:
    """The Python blocks of the document that its own test runs, or those that it leaves out."""
    text = (ROOT / "docs" / "write-a-policy.md").read_text()
    found = re.findall(
        r"^(<!-- not run: [^\n]*-->\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    return [code for comment, code in found if bool(comment) == opted_out]


def passed_in(folder: Path, **files: str) -> int:
    """How many tests pass in files with these names, where none fails."""
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        capture_output=True, text=True, cwd=folder, timeout=280, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout
    return int(re.findall(r"(\d+) passed", answer.stdout)[0])


def test_the_policy_of_the_document_passes_the_suite(tmp_path: Path) -> None:
    """The blocks are a test file as they stand."""
    assert passed_in(tmp_path, test_mine="\n\n".join(document_blocks(opted_out=False))) >= 18


def test_the_queue_policy_of_the_document_passes_its_suite(tmp_path: Path) -> None:
    _, policy, suite = document_blocks(opted_out=True)
    assert passed_in(tmp_path, comeback=policy, test_comeback=suite) >= 26
