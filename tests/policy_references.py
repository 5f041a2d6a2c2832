"""Every queue policy once more, by lists and dictionaries, written from its description.

Slow on purpose: nothing here is shared with what it judges. Lists begin with the oldest key.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NEVER = 10**9


class Reference:
    """Get or insert, with explicit removal, pinned keys and sizes."""

    def __init__(self, capacity: int, sizes: Mapping[int, int] | None = None) -> None:
        self.capacity = capacity
        self.sizes = sizes or {}
        self.pinned: set[int] = set()
        self.evicted: list[int] = []
        self.now = -1

    def size(self, key: int) -> int:
        return self.sizes.get(key, 1)

    def weight(self, keys: Iterable[int]) -> int:
        return sum(map(self.size, keys))

    def share(self, ratio: float) -> int:
        return int(self.capacity * ratio)

    def able(self, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if key not in self.pinned]

    def request(self, key: int) -> bool:
        self.now += 1
        if key in self.residents():
            self.hit(key)
            return True
        if self.size(key) > self.capacity:
            return False
        self.miss(key)
        room = self.capacity - self.size(key)
        if self.weight(self.residents()) > room and self.refuses(key):
            return False
        while self.weight(self.residents()) > room:
            self.evicted.append(self.evict())
        self.insert(key)
        return False

    def run(self, keys: Iterable[int]) -> list[bool]:
        return [self.request(key) for key in keys]

    def residents(self) -> list[int]:
        raise NotImplementedError

    def hit(self, key: int) -> None:
        """Changes nothing unless a policy says so."""

    def miss(self, key: int) -> None:
        """Changes nothing unless a policy says so."""

    def refuses(self, key: int) -> bool:
        return False

    def insert(self, key: int) -> None:
        raise NotImplementedError

    def evict(self) -> int:
        raise NotImplementedError

    def remove(self, key: int) -> None:
        for queue in vars(self).values():
            if isinstance(queue, list) and queue is not self.evicted and key in queue:
                queue.remove(key)
            if isinstance(queue, dict) and queue is not self.sizes:
                queue.pop(key, None)


class FIFO(Reference):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.queue: list[int] = []

    def residents(self) -> list[int]:
        return self.queue

    def insert(self, key: int) -> None:
        self.queue.append(key)

    def evict(self) -> int:
        victim = self.able(self.queue)[0]
        self.queue.remove(victim)
        return victim


class LRU(FIFO):
    def hit(self, key: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)


class MRU(LRU):
    def evict(self) -> int:
        victim = self.able(self.queue)[-1]
        self.queue.remove(victim)
        return victim


class CLOCK(FIFO):
    most = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.uses: dict[int, int] = {}

    def hit(self, key: int) -> None:
        self.uses[key] = min(self.uses[key] + 1, self.most)

    def insert(self, key: int) -> None:
        self.queue.append(key)
        self.uses[key] = 0

    def evict(self) -> int:
        while True:
            for key in self.able(self.queue):
                self.queue.remove(key)
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
                self.queue.append(key)


class CLOCK2(CLOCK):
    most = 3


class SIEVE(FIFO):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.used: dict[int, bool] = {}
        self.hand: int | None = None

    def hit(self, key: int) -> None:
        self.used[key] = True

    def insert(self, key: int) -> None:
        self.queue.append(key)
        self.used[key] = False

    def _after(self, key: int) -> int | None:
        at = self.queue.index(key) + 1
        return self.queue[at] if at < len(self.queue) else None

    def evict(self) -> int:
        key = self.queue[0] if self.hand is None else self.hand
        while key in self.pinned or self.used[key]:
            if key not in self.pinned:
                self.used[key] = False
            after = self._after(key)
            key = self.queue[0] if after is None else after
        self.hand = self._after(key)
        self.queue.remove(key)
        return key

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self._after(key)
        super().remove(key)


class SLRU(Reference):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.probation: list[int] = []
        self.protected: list[int] = []

    def residents(self) -> list[int]:
        return self.probation + self.protected

    def hit(self, key: int) -> None:
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        while self.weight(self.protected) > self.share(0.8):
            self.probation.append(self.protected.pop(0))

    def insert(self, key: int) -> None:
        self.probation.append(key)

    def evict(self) -> int:
        victim = (self.able(self.probation) + self.able(self.protected))[0]
        (self.probation if victim in self.probation else self.protected).remove(victim)
        return victim


class TwoQueue(Reference):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.a1in: list[int] = []
        self.a1out: list[int] = []
        self.am: list[int] = []
        self.came_back = False

    def residents(self) -> list[int]:
        return self.a1in + self.am

    def hit(self, key: int) -> None:
        if key in self.am:
            self.am.remove(key)
            self.am.append(key)

    def miss(self, key: int) -> None:
        self.came_back = key in self.a1out
        if self.came_back:
            self.a1out.remove(key)

    def insert(self, key: int) -> None:
        (self.am if self.came_back else self.a1in).append(key)

    def evict(self) -> int:
        young, old = self.able(self.a1in), self.able(self.am)
        is_over = self.weight(self.a1in) > max(1, self.share(0.25))
        victim = (young + old if is_over else old + young)[0]
        if victim in self.am:
            self.am.remove(victim)
            return victim
        self.a1in.remove(victim)
        self.a1out.append(victim)
        while self.weight(self.a1out) > self.share(0.5):
            self.a1out.pop(0)
        return victim


class S3FIFO(Reference):
    threshold = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.to_main = self.was_full = False

    def residents(self) -> list[int]:
        return self.small + self.main

    def hit(self, key: int) -> None:
        self.uses[key] = min(self.uses[key] + 1, 3)

    def miss(self, key: int) -> None:
        self.to_main = key in self.ghosts
        if self.to_main:
            self.ghosts.remove(key)

    def cap_small(self) -> int:
        return max(1, self.share(0.1))

    def insert(self, key: int) -> None:
        small_is_full = self.weight(self.small) >= self.cap_small()
        to_main = self.to_main or (not self.was_full and small_is_full)
        self.uses[key] = 0
        (self.main if to_main else self.small).append(key)

    def evict(self) -> int:
        self.was_full = True
        while True:
            main_first = self.weight(self.main) > self.capacity - self.cap_small()
            order = [self._from_main, self._from_small]
            for search in order if main_first else order[::-1]:
                victim = search()
                if victim is not None:
                    return victim

    def _from_small(self) -> int | None:
        for key in self.able(self.small):
            self.small.remove(key)
            if self.uses[key] >= self.threshold:
                self.uses[key] = 0
                self.main.append(key)
                continue
            self.ghosts.append(key)
            while self.weight(self.ghosts) > self.share(0.9):
                self.ghosts.pop(0)
            return key
        return None

    def _from_main(self) -> int | None:
        while self.able(self.main):
            for key in self.able(self.main):
                self.main.remove(key)
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
                self.main.append(key)
        return None


class S3FIFO2(S3FIFO):
    threshold = 2


class ARC(Reference):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0
        self.case = 4

    def residents(self) -> list[int]:
        return self.t1 + self.t2

    def hit(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def miss(self, key: int) -> None:
        b1, b2 = self.weight(self.b1), self.weight(self.b2)
        self.case = 2 if key in self.b1 else 3 if key in self.b2 else 4
        if self.case == 2:
            self.p = min(float(self.capacity), self.p + max(1.0, b2 / b1))
            self.b1.remove(key)
        elif self.case == 3:
            self.p = max(0.0, self.p - max(1.0, b1 / b2))
            self.b2.remove(key)

    def evict(self) -> int:
        """REPLACE, and for a new key the trimming of ghosts that comes before it."""
        t1, b1 = self.weight(self.t1), self.weight(self.b1)
        if self.case == 4:
            if t1 + b1 >= self.capacity and t1 < self.capacity and self.b1:
                self.b1.pop(0)
            elif t1 == self.capacity and self.able(self.t1):
                victim = self.able(self.t1)[0]
                self.t1.remove(victim)
                return victim
            elif t1 + b1 + self.weight(self.t2 + self.b2) >= 2 * self.capacity and self.b2:
                self.b2.pop(0)
        return self._replace(in_b2=self.case == 3)

    def _replace(self, *, in_b2: bool) -> int:
        t1 = self.weight(self.t1)
        first, second = (self.t1, self.b1), (self.t2, self.b2)
        if not (t1 > self.p or (in_b2 and t1 == self.p)):
            first, second = second, first
        queue, ghosts = first if self.able(first[0]) else second
        victim = self.able(queue)[0]
        queue.remove(victim)
        ghosts.append(victim)
        return victim

    def insert(self, key: int) -> None:
        (self.t1 if self.case == 4 else self.t2).append(key)
        # Only after a removal can ghosts be too many here.
        while self.weight(self.t1 + self.b1) > self.capacity and self.b1:
            self.b1.pop(0)
        while self.weight(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.capacity and self.b2:
            self.b2.pop(0)


class LIRS(Reference):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.stack: list[int] = []
        self.queue: list[int] = []
        self.lir: list[int] = []
        self.ghosts: list[int] = []
        self.returns = False
        self.cap_lir = self.capacity - max(1, self.share(0.01))

    def residents(self) -> list[int]:
        return self.lir + self.queue

    def _prune(self) -> None:
        while self.stack and self.stack[0] not in self.lir:
            gone = self.stack.pop(0)
            if gone in self.ghosts:
                self.ghosts.remove(gone)

    def _make_lir(self, key: int) -> None:
        self.stack.append(key)
        self.lir.append(key)
        while self.weight(self.lir) > self.cap_lir:
            bottom = next(k for k in self.stack if k in self.lir)
            self.stack.remove(bottom)
            self.lir.remove(bottom)
            self.queue.append(bottom)
            self._prune()
        self._prune()

    def hit(self, key: int) -> None:
        in_stack = key in self.stack
        if in_stack:
            self.stack.remove(key)
        if key in self.lir:
            self.stack.append(key)
        else:
            self.queue.remove(key)
            if in_stack:
                self._make_lir(key)
            else:
                self.stack.append(key)
                self.queue.append(key)
        self._prune()

    def miss(self, key: int) -> None:
        self.returns = key in self.ghosts
        if self.returns:
            self.ghosts.remove(key)
            self.stack.remove(key)

    def insert(self, key: int) -> None:
        if self.returns or self.weight([*self.lir, key]) <= self.cap_lir:
            self._make_lir(key)
        else:
            self.stack.append(key)
            self.queue.append(key)
            self._prune()

    def evict(self) -> int:
        if not self.able(self.queue):
            victim = self.able(k for k in self.stack if k in self.lir)[0]
            self.remove(victim)
            return victim
        victim = self.able(self.queue)[0]
        self.queue.remove(victim)
        if victim in self.stack:
            self.ghosts.append(victim)
            while self.weight(self.ghosts) > self.share(2.0):
                self.stack.remove(self.ghosts.pop(0))
        return victim

    def remove(self, key: int) -> None:
        super().remove(key)
        self._prune()


class WTinyLFU(Reference):
    window_share = 0.01

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.window: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.counts: dict[int, int] = {}
        self.cap_window = max(1, self.share(self.window_share))
        self.cap_protected = int((self.capacity - self.cap_window) * 0.8)

    def residents(self) -> list[int]:
        return self.window + self.probation + self.protected

    def _count(self, key: int) -> None:
        if self.counts.get(key, 0) == 15:
            return
        self.counts[key] = self.counts.get(key, 0) + 1

    def _age(self) -> None:
        if sum(self.counts.values()) >= 10 * self.capacity:
            self.counts = {k: count // 2 for k, count in self.counts.items()}

    def hit(self, key: int) -> None:
        self._count(key)
        self._age()
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        while self.weight(self.protected) > self.cap_protected:
            self.probation.append(self.protected.pop(0))

    def miss(self, key: int) -> None:
        self._count(key)

    def insert(self, key: int) -> None:
        self.window.append(key)
        while self.weight(self.window) > self.cap_window:
            self.probation.append(self.window.pop(0))
        self._age()

    def evict(self) -> int:
        """As if the new key were in the window already."""
        if self.able(self.window) and self.weight(self.window) >= self.cap_window:
            candidate = self.able(self.window)[0]
            self.window.remove(candidate)
            self.probation.append(candidate)
            victim = self.able(self.probation)[0]
            is_admitted = self.counts.get(candidate, 0) > self.counts.get(victim, 0)
            loser = victim if is_admitted else candidate
            self.probation.remove(loser)
            return loser
        for queue in (self.probation, self.protected, self.window):
            if self.able(queue):
                loser = self.able(queue)[0]
                queue.remove(loser)
                return loser
        raise AssertionError("nobody may leave")


class WTinyLFUWide(WTinyLFU):
    window_share = 0.5


class Ranked(Reference):
    """The lowest priority goes, among equals the one that got it first."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.priority: dict[int, tuple[float, int]] = {}
        self.uses: Counter[int] = Counter()

    def residents(self) -> list[int]:
        return list(self.priority)

    def worth(self, key: int) -> float:
        raise NotImplementedError

    def hit(self, key: int) -> None:
        self.uses[key] += 1
        self.priority[key] = self.worth(key), self.now

    def insert(self, key: int) -> None:
        self.uses[key] = 1
        self.priority[key] = self.worth(key), self.now

    def evict(self) -> int:
        victim = min(self.able(self.priority), key=lambda key: self.priority[key])
        self.left(self.priority.pop(victim)[0])
        return victim

    def left(self, priority: float) -> None:
        """Changes nothing unless a policy says so."""


class LFU(Ranked):
    def worth(self, key: int) -> float:
        return self.uses[key]


class LFUDA(Ranked):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.age = 0.0

    def worth(self, key: int) -> float:
        return self.age + self.uses[key]

    def left(self, priority: float) -> None:
        self.age = priority


class GDSF(LFUDA):
    def worth(self, key: int) -> float:
        return self.age + self.uses[key] * (1.0 / self.size(key))


class WorkloadAware(GDSF):
    """Category i is that of request i; without any, nothing is learned."""

    def __init__(self, *args: object, decay: float = 0.9999) -> None:
        super().__init__(*args)
        self.decay = decay
        self.categories: Sequence[int] = ()
        self.costs: Sequence[float] = ()
        self.last: dict[int, int] = {}
        self.used: dict[int, float] = {}
        self.reused: dict[int, float] = {}

    def reuse(self, key: int) -> float:
        if not self.categories:
            return 1.0
        category = self.last[key]
        return min(1.0, (self.reused[category] + 1) / (self.used[category] + 2))

    def worth(self, key: int) -> float:
        cost = self.costs[key] if self.costs else 1.0
        return self.age + self.reuse(key) * (self.uses[key] * (cost / self.size(key)))

    def _learn(self, key: int) -> None:
        if not self.categories:
            return
        if key in self.last:
            self.reused[self.last[key]] += 1
        category = self.categories[self.now]
        self.used[category] = self.used.get(category, 0.0) * self.decay + 1
        self.reused[category] = self.reused.get(category, 0.0) * self.decay
        self.last[key] = category

    def hit(self, key: int) -> None:
        self._learn(key)
        super().hit(key)

    def miss(self, key: int) -> None:
        self._learn(key)


class Belady(Ranked):
    """`expect` says the requests that come."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.future: Sequence[int] = ()

    def run(self, keys: Iterable[int]) -> list[bool]:
        self.future = list(keys)
        return super().run(self.future)

    def worth(self, key: int) -> float:
        later = self.future[self.now + 1 :]
        return -(self.now + 1 + later.index(key)) if key in later else -NEVER


class BeladyBypass(Belady):
    def refuses(self, key: int) -> bool:
        return self.worth(key) <= min(priority for priority, _ in self.priority.values())


REFERENCES: dict[str, Callable[..., Reference]] = {
    "fifo": FIFO,
    "lru": LRU,
    "mru": MRU,
    "clock": CLOCK,
    "clock, 2 bits": CLOCK2,
    "lfu": LFU,
    "lfu-da": LFUDA,
    "gdsf": GDSF,
    "slru": SLRU,
    "2q": TwoQueue,
    "arc": ARC,
    "lirs": LIRS,
    "sieve": SIEVE,
    "s3-fifo": S3FIFO,
    "s3-fifo, 2 uses": S3FIFO2,
    "w-tinylfu": WTinyLFU,
    "w-tinylfu, wide": WTinyLFUWide,
    "workload": WorkloadAware,
    "belady": BeladyBypass,
    "belady, all in": Belady,
}
