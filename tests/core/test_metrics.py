"""Counters of what moved where."""

import json

from tierstore.metrics import StoreMetrics


def test_the_hit_rate_is_that_of_the_first_tier() -> None:
    metrics = StoreMetrics(["fast", "dram", "disk"])
    metrics.tiers[0].hits, metrics.tiers[1].hits, metrics.tiers[2].hits = 6, 3, 1
    assert metrics.selected == 10
    assert metrics.hit_rate == 0.6


def test_before_the_first_selection_nothing_was_missed() -> None:
    assert StoreMetrics(["fast", "disk"]).hit_rate == 1.0


def test_counters_become_plain_data() -> None:
    metrics = StoreMetrics(["fast"])
    metrics.tiers[0].bytes_read = 4096
    assert json.loads(json.dumps(metrics.to_dict())) == [
        {
            "name": "fast",
            "hits": 0,
            "bytes_read": 4096,
            "bytes_written": 0,
            "evictions": 0,
            "demotions": 0,
        }
    ]
