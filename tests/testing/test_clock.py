"""A clock that only a test moves."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError
from tierstore.testing import FakeClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = FakeClock(100.0)
    assert [clock(), clock()] == [100.0, 100.0]
    clock.advance(2.5)
    clock.advance(0)
    assert clock() == 102.5


def test_a_clock_can_be_set_back() -> None:
    clock = FakeClock(100.0)
    clock.jump(-250.0)
    assert clock() == -150.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_does_not_pass_backwards(seconds: float) -> None:
    clock = FakeClock(5.0)
    with pytest.raises(ConfigError, match="use jump to set it back"):
        clock.advance(seconds)
    assert clock() == 5.0
