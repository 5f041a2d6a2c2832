"""The whole store against a dictionary, under several options, and the laws of any keyed store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from tierstore.codecs import ShuffleZstdCodec
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.keyed import KeyedStoreTests
from tierstore.testing.keyed_machine import KeyedStoreMachine

if TYPE_CHECKING:
    from pathlib import Path
    from unittest import TestCase

EXAMPLES, STEPS = {"dev": (8, 30), "ci": (15, 40), "nightly": (500, 100)}[
    os.environ.get("HYPOTHESIS_PROFILE", "dev")
]

pytestmark = pytest.mark.timeout(3600)  # of a nightly run


def checked(machine: type[KeyedStoreMachine]) -> type[TestCase]:
    case: type[TestCase] = machine.TestCase
    phases = [Phase.generate] if "MUTATED" in os.environ else list(Phase)
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=EXAMPLES, stateful_step_count=STEPS, phases=phases,
        suppress_health_check=[HealthCheck.too_slow],  # others may have the processor
    )  # fmt: skip
    return case


class WithoutMemory(KeyedStoreMachine):
    options = {"disk": "512KiB", "segment": "64KiB", "dram": None}  # noqa: RUF012


class Compressed(KeyedStoreMachine):
    options = {  # noqa: RUF012
        "disk": "512KiB", "segment": "64KiB", "dram": "128KiB", "codec": ShuffleZstdCodec(2),
        "verify": "always", "threads": 1,
    }  # fmt: skip


class Tiny(KeyedStoreMachine):
    """Two segments, so that whole files are emptied for others, and no threads."""

    options = {"disk": "256KiB", "segment": "64KiB", "dram": "80KiB", "threads": 0}  # noqa: RUF012


TestStore = checked(KeyedStoreMachine)
TestWithoutMemory = checked(WithoutMemory)
TestCompressed = checked(Compressed)
TestTiny = checked(Tiny)


class TestKeyedStore(KeyedStoreTests):
    def make_store(self, folder: Path) -> KeyedStore:
        return KeyedStore(
            folder, Identity(model="laws"), disk="4MiB", segment="256KiB", dram="1MiB"
        )


class TestKeyedStoreOnDiskOnly(KeyedStoreTests):
    def make_store(self, folder: Path) -> KeyedStore:
        return KeyedStore(folder, Identity(model="laws"), disk="4MiB", segment="256KiB")
