"""Suites that prove an implementation right: inherit one, say how to make yours, run pytest.

Needs the packages of the extra ``test``. Each class has one abstract method and many tests::

    class TestMyTier(TierTests):
        def make_tier(self, layout, limit_bytes, folder):
            return MyTier(layout, limit_bytes)
"""

import pytest

pytest.register_assert_rewrite(
    "tierstore.testing.admissions",
    "tierstore.testing.codecs",
    "tierstore.testing.distinct",
    "tierstore.testing.indexes",
    "tierstore.testing.keyed",
    "tierstore.testing.keyed_machine",
    "tierstore.testing.policies",
    "tierstore.testing.policy_cache",
    "tierstore.testing.policy_machine",
    "tierstore.testing.policy_replays",
    "tierstore.testing.policy_traces",
    "tierstore.testing.records",
    "tierstore.testing.tiers",
)

from tierstore.testing.admissions import AdmissionTests  # noqa: E402
from tierstore.testing.clock import FakeClock  # noqa: E402
from tierstore.testing.codecs import CodecTests  # noqa: E402
from tierstore.testing.distinct import assert_distinct  # noqa: E402
from tierstore.testing.faults import FaultIO  # noqa: E402
from tierstore.testing.history import History  # noqa: E402
from tierstore.testing.indexes import IndexSetting, IndexTests  # noqa: E402
from tierstore.testing.keyed import KeyedStoreTests  # noqa: E402
from tierstore.testing.keyed_machine import KeyedStoreMachine  # noqa: E402
from tierstore.testing.kills import KillIO  # noqa: E402
from tierstore.testing.policies import PolicyTests  # noqa: E402
from tierstore.testing.policy_replays import QueuePolicyTests, ReplayTests  # noqa: E402
from tierstore.testing.records import RecordTierTests  # noqa: E402
from tierstore.testing.tiers import TierTests  # noqa: E402

__all__ = [
    "AdmissionTests",
    "CodecTests",
    "FakeClock",
    "FaultIO",
    "History",
    "IndexSetting",
    "IndexTests",
    "KeyedStoreMachine",
    "KeyedStoreTests",
    "KillIO",
    "PolicyTests",
    "QueuePolicyTests",
    "RecordTierTests",
    "ReplayTests",
    "TierTests",
    "assert_distinct",
]
