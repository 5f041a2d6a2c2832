"""What is compiled of a policy, and when it is compiled anew."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierstore.policies.queues import fifo

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = {
    "compiled_policy": """
import compiled_rules
from compiled_numbers import FIRST
from tierstore.kernels.jit import part
from tierstore.policies import QueuePolicy
from tierstore.policies.queues.lists import push
from tierstore.policies.queues.loops import compile_loops

RESIDENT = 1


@part
def insert(q, d, k):
    push(q, d, FIRST, k)


@part
def evict(q, d):
    return compiled_rules.evict(q, d)


class Mine(QueuePolicy):
    lists = 1
    loops = compile_loops(globals())
""",
    "compiled_rules": """
import compiled_numbers
from tierstore.kernels.jit import part
from tierstore.policies.queues import lists


@part
def evict(q, d):
    k = lists.oldest(q, d, compiled_numbers.SECOND - 1)
    lists.unlink(q, d, k)
    return k
""",
    "compiled_numbers": "FIRST = 0\nSECOND = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    forget()


def forget() -> None:
    for name in FILES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def version() -> str:
    """The name that the loops of the policy have, once it is imported anew."""
    forget()
    policy: Any = importlib.import_module("compiled_policy")
    name: str = policy.Mine.loops.request.__name__
    return name


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("compiled_policy", "return compiled", "return 0 + compiled"),
        ("compiled_rules", "k = lists", "k = 0 + lists"),
        ("compiled_numbers", "FIRST = 0", "FIRST = 1"),
        ("compiled_numbers", "SECOND = 1", "SECOND = 2"),
    ],
    ids=["its own", "a function of a module", "a number", "a number of a module of a module"],
)
def test_whatever_is_compiled_in_makes_another_version(
    folder: Path, name: str, old: str, new: str
) -> None:
    """Else a loop that was kept on disk would go on as before."""
    before = version()
    assert version() == before
    file = folder / f"{name}.py"
    changed = file.read_text().replace(old, new)
    assert changed != file.read_text()
    file.write_text(changed)
    assert version() != before


@pytest.mark.parametrize("file", [None, "<stdin>", "/tmp/ipykernel_1/2.py"])
def test_a_policy_that_is_in_no_file_is_compiled_all_the_same(file: str | None) -> None:
    """As one that was typed into a notebook."""
    names: dict[str, Any] = {"__name__": "typed"}
    if file is not None:
        names["__file__"] = file
    exec(compile(Path(fifo.__file__).read_text(), file or "<string>", "exec"), names)
    policy = names["FIFO"]()
    policy.start(4, 2)
    assert policy.request(np.array([0, 1, 0, 2, 0], np.int32)).tolist() == [
        False, False, True, False, False
    ]  # fmt: skip
