"""Queue policies with a known mistake: the tests' independent ones tell each of them apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from policy_references import REFERENCES

from tierstore.policies import Belady
from tierstore.policies.queues import arc, clock, lru, s3fifo, sieve, tinylfu
from tierstore.testing.policy_cache import fewest_misses, next_uses
from tierstore.testing.policy_work import in_python

if TYPE_CHECKING:
    from types import ModuleType

    from tierstore.policies import QueuePolicy

KEYS = 40


class Mutant(NamedTuple):
    """A text that a file has, what it should be instead, the file, its class and its reference."""

    old: str
    new: str
    module: ModuleType
    policy: str
    reference: str


AT_THE_HAND = """
    hand = q.head[d, _HAND]
    older = q.node[hand, lists.OLDER] if hand >= 0 else -1
    if older < 0:
        push(q, d, _QUEUE, k)
    else:
        put(q, k, PLACE, _QUEUE)
        put(q, k, lists.OLDER, older)
        put(q, k, NEWER, hand)
        put(q, older, NEWER, k)
        put(q, hand, lists.OLDER, k)
        q.head[d, 4] += 1
"""
CLEARS_ALL = """
    for other in range(q.node.shape[0]):
        put(q, other, COUNT, 0)
    push(q, d, _QUEUE, k)
"""

MUTANTS = {
    "LRU without touch": Mutant(
        "def hit(q, d, k):\n    move(q, d, _QUEUE, k)", "def hit(q, d, k):\n    pass",
        lru, "QueueLRU", "lru",
    ),
    "CLOCK that clears on insert": Mutant(
        "    put(q, k, COUNT, 0)\n    push(q, d, _QUEUE, k)\n", CLEARS_ALL, clock, "CLOCK", "clock"
    ),
    "SIEVE inserting at the hand": Mutant(
        "    push(q, d, _QUEUE, k)\n", AT_THE_HAND, sieve, "SIEVE", "sieve"
    ),
    "S3-FIFO without ghosts": Mutant(
        "        put(q, k, COUNT, _MAIN)\n", "        pass\n", s3fifo, "S3FIFO", "s3-fifo"
    ),
    "S3-FIFO, threshold off by one": Mutant(
        "q.node[k, COUNT] < q.rules[_PROMOTE_AT]", "q.node[k, COUNT] <= q.rules[_PROMOTE_AT]",
        s3fifo, "S3FIFO", "s3-fifo",
    ),
    "ARC with whole ratios": Mutant("np.true_divide", "np.floor_divide", arc, "ARC", "arc"),
    "W-TinyLFU admitting ties": Mutant(
        "COUNT] <= q.node[k, COUNT]", "COUNT] < q.node[k, COUNT]",
        tinylfu, "WTinyLFU", "w-tinylfu",
    ),
}  # fmt: skip


def made_of(mutant: Mutant, new: str) -> QueuePolicy:
    """The policy of the file with that text in place of the old one, as plain Python."""
    file = mutant.module.__file__
    assert file is not None
    source = Path(file).read_text()
    assert mutant.old in source
    names: dict[str, Any] = {"__name__": mutant.module.__name__, "__file__": file}
    exec(compile(source.replace(mutant.old, new), file, "exec"), names)
    policy: QueuePolicy = names[mutant.policy]()
    loops: Any = policy.loops
    setattr(policy, "loops", type(loops)(*map(in_python, loops)))  # noqa: B010 (a class variable)
    return policy


def traces() -> list[tuple[list[int], int]]:
    """Skewed choices that move on, with capacities."""
    out = []
    for seed, capacity in enumerate([3, 10, 17, 25]):
        random = np.random.default_rng(seed)
        drawn = random.zipf(1.2, 1000) + random.integers(0, 5, 1000) + np.arange(1000) // 100
        out.append(((drawn % KEYS).tolist(), capacity))
    return out


def hits(policy: QueuePolicy, trace: list[int], capacity: int) -> list[bool]:
    policy.start(KEYS, capacity)
    found: list[bool] = policy.request(np.array(trace, np.int32)).tolist()
    return found


def differs(mutant: Mutant, new: str) -> bool:
    reference = REFERENCES[mutant.reference]
    return any(
        hits(made_of(mutant, new), trace, capacity) != reference(capacity).run(trace)
        for trace, capacity in traces()
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    assert not differs(mutant, mutant.old)
    assert differs(mutant, mutant.new)


def test_belady_that_looks_back_is_caught() -> None:
    """It evicts what was used longest ago, and misses more than the best choice does."""
    for trace, capacity in traces():
        back = [len(trace) - use for use in next_uses(trace[::-1])[::-1]]
        misses = {}
        for name, future in {"ahead": next_uses(trace), "back": back}.items():
            policy = Belady()
            policy.start(KEYS, capacity)
            policy.expect(np.array(future, np.int64))
            misses[name] = int((~policy.request(np.array(trace, np.int32))).sum())
        assert misses["ahead"] == fewest_misses(trace, capacity) < misses["back"]
