"""That every mutation of `make mutate` still fits the code, and names tests that are there."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from mutations import MUTATIONS, ROOT, Mutation, mutate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_makes_other_code_that_compiles(mutation: Mutation, tmp_path: Path) -> None:
    module = mutation.file.removesuffix(".py").replace("/", ".")
    spec = find_spec(f"tierstore.{module}")
    assert spec is not None
    assert spec.origin is not None
    file = tmp_path / "tierstore" / mutation.file
    file.parent.mkdir(parents=True)
    shutil.copy(spec.origin, file)
    before = file.read_text()
    mutate(tmp_path, mutation)
    assert file.read_text() != before
    compile(file.read_text(), mutation.file, "exec")
    assert all((ROOT / test).exists() for test in mutation.tests)
