"""A clock that a test moves."""

from __future__ import annotations

import threading

from tierstore.errors import ConfigError


class FakeClock:
    """Call it for the time in seconds; it stands still until it is moved. Threads may call."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; also usable where a function that sleeps is asked for."""
        if not seconds >= 0:
            raise ConfigError(f"advance({seconds}): expected 0 or more; use jump to set it back")
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Set the clock forward, or back, as its owner may."""
        with self._lock:
            self._now += seconds
