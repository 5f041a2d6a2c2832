"""Counters of what moved where."""

from tierstore.metrics import StoreMetrics


def test_the_hit_rate_is_that_of_the_first_tier() -> None:
    metrics = StoreMetrics(["fast", "dram", "disk"])
    metrics.tiers[0].hits, metrics.tiers[1].hits, metrics.tiers[2].hits = 6, 3, 1
    assert metrics.selected == 10
    assert metrics.hit_rate == 0.6


def test_before_the_first_selection_nothing_was_missed() -> None:
    assert StoreMetrics(["fast", "disk"]).hit_rate == 1.0
