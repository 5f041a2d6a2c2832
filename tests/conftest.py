"""Settings that every test shares."""

import os
import signal

import pytest
import torch
from hypothesis import settings

# Child processes that a test starts show where they crashed.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# What runs in the background of a shell ignores interrupts, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The models of the tests are made or installed here; none is ever looked up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadlines: the first example of a test may compile a kernel.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=5_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
