"""What every eviction policy must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory import HandleSpace
from tierstore.errors import PolicyError
from tierstore.interfaces import Access, BlockScores, Demand
from tierstore.memory import unlimited
from tierstore.testing.laws import law
from tierstore.testing.policy_traces import PolicyTraceTests

if TYPE_CHECKING:
    from tierstore.interfaces import EvictionPolicy, Ids

SEGMENTS = 3
BLOCKS = 70
"""More than the handles that a segment gets at once."""

Script = Sequence[tuple[str, int]]
scripts = st.lists(
    st.tuples(
        st.sampled_from(["access", "access without scores", "reuse", "grow"]), st.integers(0)
    ),
    max_size=12,
)
"""What happens to a policy: names of `History` methods, and the seed of each."""


class Fact(NamedTuple):
    """A domain, its residents, which of them may leave, and how many must."""

    domain: int
    residents: Ids
    eligible: list[bool]
    need: int


class History:
    """A policy bound to a handle space, and what a script does to it."""

    def __init__(self, policy: EvictionPolicy, script: Script = ()) -> None:
        self.policy = policy
        self.space = HandleSpace(unlimited())
        policy.bind(self.space)
        self.segments = self.space.open(SEGMENTS)
        self.space.extend(self.segments, BLOCKS)
        self._step = 0
        self.last = self.idle()
        for event, seed in script:
            getattr(self, event.replace(" ", "_"))(np.random.default_rng(seed))

    def handles(self, segment: int) -> Ids:
        return self.space.all_handles(segment)

    def idle(self) -> Access:
        """A step in which nothing was selected."""
        none: Ids = np.empty(0, np.int32)
        return Access(np.zeros(1, np.int64), none, none.astype(np.float32), self._step)

    def access(self, random: np.random.Generator, *, scores: bool = True) -> None:
        """Some blocks of each segment are selected."""
        self._step += 1
        chosen = [
            random.choice(self.handles(s), random.integers(0, 9), replace=False)
            for s in self.segments.tolist()
        ]
        row_ptr = np.cumsum([0, *map(len, chosen)])
        selected = np.concatenate(chosen).astype(np.int32)
        everything = self._everything(random) if scores else None
        values = random.normal(size=len(selected)).astype(np.float32)
        self.last = Access(row_ptr, selected, values, self._step, everything)
        self.policy.on_access(self.last)

    def _everything(self, random: np.random.Generator) -> BlockScores:
        """Coarse units; the last few blocks are not in the index yet."""
        blocks = int(self.space.blocks[self.segments].min())
        unit_of = random.integers(0, 16, (SEGMENTS, blocks)).astype(np.int32)
        unit_of[:, blocks - 3 :] = -1
        unit_scores = random.normal(size=(SEGMENTS, 16)).astype(np.float32)
        return BlockScores(unit_scores, unit_of, self.segments.copy())

    def access_without_scores(self, random: np.random.Generator) -> None:
        """As `access`, by an index that scores nothing but what it selects."""
        self.access(random, scores=False)

    def reuse(self, random: np.random.Generator) -> None:
        """A segment goes, and its handles come back as blocks of another."""
        position = int(random.integers(SEGMENTS))
        gone = int(self.segments[position])
        self.policy.on_remove(self.handles(gone))
        self.space.close(gone)
        self.segments[position] = self.space.open(1)[0]
        self.space.extend(self.segments[position : position + 1], BLOCKS)
        self.last = self.idle()

    def grow(self, random: np.random.Generator) -> None:
        """The segments get more blocks, and the space more handles."""
        self.space.extend(self.segments, int(random.integers(1, 80)))

    def facts(self, random: np.random.Generator) -> list[Fact]:
        """Room wanted in some domains, possible everywhere."""
        facts = []
        for segment in random.permutation(self.segments)[
            : random.integers(1, SEGMENTS + 1)
        ].tolist():
            handles = self.handles(segment)
            residents = random.permutation(handles)[: random.integers(0, 40)]
            eligible = (random.random(len(residents)) < 0.7).tolist()
            facts.append(
                Fact(segment, residents, eligible, int(random.integers(sum(eligible) + 1)))
            )
        return facts

    def demand(self, facts: list[Fact]) -> Demand:
        """The facts as the store would put them, in the running step."""
        return Demand(
            domains=np.array([fact.domain for fact in facts], np.int32),
            row_ptr=np.cumsum([0, *(len(fact.residents) for fact in facts)]),
            residents=np.concatenate([fact.residents for fact in facts]).astype(np.int32),
            eligible=np.array([e for fact in facts for e in fact.eligible], np.bool_),
            need=np.array([fact.need for fact in facts], np.int64),
            access=self.last,
        )

    def victims(self, facts: list[Fact]) -> list[int]:
        victims: list[int] = self.policy.victims(self.demand(facts)).tolist()
        return victims


class PolicyTests(PolicyTraceTests):
    """Inherit, and make the policy. Its handles are bare numbers here: there is no store."""

    @law
    @given(scripts, st.integers(0))
    def test_victims_are_as_many_as_needed_and_only_eligible(
        self, script: Script, seed: int
    ) -> None:
        history = History(self.make_policy(), script)
        facts = history.facts(np.random.default_rng(seed))
        victims = history.victims(facts)
        assert len(victims) == len(set(victims)) == sum(fact.need for fact in facts)
        for fact in facts:
            mine, victims = victims[: fact.need], victims[fact.need :]
            may = zip(fact.residents.tolist(), fact.eligible, strict=True)
            assert set(mine) <= {handle for handle, eligible in may if eligible}

    @law
    @given(scripts, st.integers(0))
    def test_the_same_history_has_the_same_victims(self, script: Script, seed: int) -> None:
        first, second = (History(self.make_policy(), script) for _ in range(2))
        facts = first.facts(np.random.default_rng(seed))
        assert first.victims(facts) == second.victims(facts)

    @law
    @given(scripts, scripts, st.integers(0))
    def test_asking_for_victims_changes_nothing(
        self, script: Script, later: Script, seed: int
    ) -> None:
        """The store may evict fewer than it asked for, or ask again."""
        asked, other = (History(self.make_policy(), script) for _ in range(2))
        facts = asked.facts(np.random.default_rng(seed))
        demand = asked.demand(facts)
        before = [array.copy() for array in _arrays(demand)]
        first = asked.policy.victims(demand).tolist()
        assert all(map(np.array_equal, _arrays(demand), before))
        assert asked.victims(facts) == first
        for event, event_seed in later:
            for history in (asked, other):
                getattr(history, event.replace(" ", "_"))(np.random.default_rng(event_seed))
        facts = asked.facts(np.random.default_rng(seed + 1))
        assert asked.victims(facts) == other.victims(facts)

    @law
    @given(scripts, st.integers(0))
    def test_too_few_eligible_residents_are_an_error(self, script: Script, seed: int) -> None:
        """All or none: the other domains' victims are not returned either."""
        history = History(self.make_policy(), script)
        facts = history.facts(np.random.default_rng(seed))
        short = seed % len(facts)
        facts[short] = facts[short]._replace(need=sum(facts[short].eligible) + 1)
        with pytest.raises(PolicyError):
            history.victims(facts)

    def test_a_policy_that_saw_nothing_still_finds_victims(self) -> None:
        history = History(self.make_policy())
        residents = history.handles(1)[:5]
        victims = history.victims([Fact(1, residents, [True, False, True, True, True], 4)])
        assert sorted(victims) == residents[[0, 2, 3, 4]].tolist()

    def test_no_need_has_no_victims(self) -> None:
        history = History(self.make_policy(), [("access", 1)])
        residents = history.handles(0)[:3]
        none: Ids = np.empty(0, np.int32)
        assert history.victims([Fact(0, residents, [True] * 3, 0), Fact(1, none, [], 0)]) == []
        assert history.victims([Fact(0, residents, [False] * 3, 0)]) == []

    def test_a_selected_block_may_not_be_resident(self) -> None:
        """A policy hears of misses too; its victims still come from the residents alone."""
        history = History(self.make_policy())
        handles = history.handles(0)
        chosen = handles[10:20]
        scores = np.zeros(len(chosen), np.float32)
        access = Access(np.array([0, len(chosen)]), chosen, scores, 1)
        history.policy.on_access(access)
        history.last = replace(access, step=2)
        assert set(history.victims([Fact(0, handles[:6], [True] * 6, 6)])) == set(
            handles[:6].tolist()
        )

    def test_handles_that_come_back_are_new_blocks(self) -> None:
        """Removing what was never seen, and all handles in other hands afterwards."""
        history = History(self.make_policy(), [("access", 3)])
        history.policy.on_remove(history.handles(2))
        for seed in range(5):
            history.reuse(np.random.default_rng(seed))
            history.access(np.random.default_rng(seed))
        for segment in history.segments.tolist():
            residents = history.handles(segment)
            victims = history.victims([Fact(segment, residents, [True] * BLOCKS, BLOCKS)])
            assert sorted(victims) == sorted(residents.tolist())


def _arrays(demand: Demand) -> list[np.ndarray]:
    return [demand.domains, demand.row_ptr, demand.residents, demand.eligible, demand.need]
