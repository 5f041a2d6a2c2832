"""What a policy decides in another process, where strings and sets hash otherwise."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import pytest

from tierstore.testing.policy_cache import PolicyCache

if TYPE_CHECKING:
    from types import ModuleType

_TIMEOUT_S = 120


def evicted_elsewhere(suite: type, trace: list[int], capacity: int) -> list[int]:
    """Keys that leave in a process with another PYTHONHASHSEED, for the policy of `suite`.

    Skips a suite that other processes cannot import.
    """
    file = inspect.getsourcefile(suite)
    if file is None or not os.path.exists(file) or "<locals>" in suite.__qualname__:
        pytest.skip(f"no other process can import {suite.__qualname__} from a file")
    work = _other_process().submit(_evicted, file, suite.__qualname__, trace, capacity)
    return work.result(_TIMEOUT_S)


@cache
def _other_process() -> ProcessPoolExecutor:
    """One process for all suites: starting it takes seconds."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with patch.dict(os.environ, PYTHONHASHSEED=seed):
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result(_TIMEOUT_S)
    return pool


def _evicted(file: str, name: str, trace: list[int], capacity: int) -> list[int]:
    suite = cast("Any", reduce(getattr, name.split("."), _module(file)))
    cache = PolicyCache(suite().make_policy(), max(trace) + 1, capacity)
    return cache.run(trace, 1).evicted


@cache
def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("suites_of_another_process", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
