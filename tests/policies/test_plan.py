"""Plan files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.policies.plan import Plan, Tuning
from tierstore.policies.windows import WINDOWS

PLAN = Plan(
    np.array([[1.5, 2.0, 2.5], [1.0, 3.0, 2.0]]),
    9,
    64,
    np.array([[0.5, 1.0, 1.25], [0.75, 1.5, 1.0]]),
    np.linspace(2, 0, 6 * len(WINDOWS)).reshape(2, 3, -1),
    {"model": "tiny", "documents": ["ä.txt"]},
    np.array([[0.0, 1.0, 2.0], [3.0, 0.5, 0.25]]),
    Tuning(12.0, 4),
)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    for plan in (PLAN, Plan(PLAN.windows, 9, 64)):
        plan.save(tmp_path / "plan.json")
        found = Plan.load(tmp_path / "plan.json")
        np.testing.assert_array_equal(found.windows, plan.windows)
        np.testing.assert_array_equal(found.shares, plan.shares)
        assert (found.budgets is None) is (plan.budgets is None)
        assert found.to_dict() == plan.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_of_version_1_is_read_without_what_came_later(tmp_path: Path) -> None:
    content = PLAN.to_dict() | {"version": 1}
    del content["pinned"], content["tuning"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    plan = Plan.load(tmp_path / "plan.json")
    np.testing.assert_array_equal(plan.windows, PLAN.windows)
    assert plan.pinned is None
    assert plan.tuning is None


def test_the_plan_in_the_documents_is_read() -> None:
    plan = Plan.load(Path(__file__).parents[2] / "docs" / "results" / "smollm2.plan.json")
    assert plan.windows.shape == (30, 3)


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in ({"tokens_per_centroid": 0.0}, {"micro_batch": -1}):
        with pytest.raises(ConfigError, match="plan: "):
            Tuning(**settings)


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PLAN.save(tmp_path / "nowhere" / "plan.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "another kind"),
        ({"version": 3}, "version 3: this tierstore reads versions 1 and 2"),
        ({"version": None}, "version None"),
        ({"version": True}, "version True"),
        ({"version": 2.0}, "version 2.0"),
        ({"query_heads": 10**300}, "query_heads=1000"),
        ({"facts": {"model": float("nan")}}, "NaN is no number"),
        ({"facts": {"model": [float("-inf")]}}, "-Infinity is no number"),
        ({"query_heads": 0}, "query_heads=0"),
        ({"query_heads": True}, "query_heads=True"),
        ({"head_dim": "64"}, "head_dim='64'"),
        ({"facts": []}, "facts="),
        ({"windows": None}, "a table"),
        ({"windows": []}, "windows of shape"),
        ({"windows": [[]]}, "windows of shape"),
        ({"windows": [[1, 2], [1]]}, "a table"),
        ({"windows": [["1"]]}, "a table"),
        ({"windows": [[True]]}, "a table"),
        ({"windows": [[float("nan")]]}, "NaN is no number"),
        ({"windows": [[float("inf")]]}, "Infinity is no number"),
        ({"windows": [[1e300]]}, "a table"),
        ({"windows": [[10**400]]}, "a table"),
        ({"windows": [[0.5]], "budgets": None}, "smaller than its head's budget"),
        ({"windows": [[2.0]]}, "expected the same"),
        ({"budgets": 3}, "budgets of shape"),
        ({"budgets": [[[1]]]}, "budgets of shape"),
        ({"misses": [[1, 2, 3], [1, 2, 3]]}, "misses of shape"),
        ({"misses": (-PLAN.misses).tolist() if PLAN.misses is not None else None}, "numbers >= 0"),
        ({"misses": "many"}, "a table"),
        ({"budgets": [[0.01, 1, 1], [1, 1, 1]]}, "none below"),
        ({"budgets": [[1, 1, 1], [1, 1, 1.5]]}, "expected at most 1"),
        ({"budgets": [[1.75, 1, 1], [0.5, 0.5, 0.5]]}, "smaller than"),
        ({"pinned": [[1, 2, 3]]}, "pinned of shape"),
        ({"pinned": [[1, 2, 3], [1, 2, -1]]}, "numbers >= 0"),
        ({"tuning": [1]}, "tuning="),
        ({"tuning": {"speed": 1}}, "expected tokens_per_centroid and micro_batch"),
        ({"tuning": {"tokens_per_centroid": 0.5}}, "tokens_per_centroid=0.5"),
        ({"tuning": {"tokens_per_centroid": True}}, "tokens_per_centroid=True"),
        ({"tuning": {"micro_batch": 0}}, "micro_batch=0"),
        ({"tuning": {"micro_batch": 2.0}}, "micro_batch=2.0"),
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_dict() | change))
    with pytest.raises(ConfigError, match=r"plan=.*plan\.json.*" + reason):
        Plan.load(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (([[1.0]], 4, 64), "expected an array of numbers"),
        ((np.array([["a"]]), 4, 64), "expected an array of numbers"),
        ((np.ones((1, 1)), 4, 64, np.array([[None]])), "expected an array of numbers"),
        ((np.ones((1, 1)), "a", 64), "query_heads='a': expected a whole number"),
        ((np.ones((1, 1)), 4, -5), "head_dim=-5: expected a whole number"),
        ((np.ones((1, 1)), 4, 64, None, None, []), "facts=.*: expected them by name"),
        ((np.ones((1, 1)), 4, 64, None, None, {"a": object()}), "facts that JSON cannot hold"),
        ((np.ones((1, 1)), 4, 64, None, None, {"a": float("nan")}), "facts that JSON cannot hold"),
    ],
)
def test_what_could_not_be_read_again_is_no_plan(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^plan: .*{reason}"):
        Plan(*arguments)


def test_a_number_too_large_for_json_is_refused(tmp_path: Path) -> None:
    """JSON reads 1e999 as infinity, without a word for it."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_dict() | {"facts": {"a": 7.125}}).replace("7.125", "1e999"))
    with pytest.raises(ConfigError, match="facts that JSON cannot hold"):
        Plan.load(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"{", b'"x"', b"[" * 100_000])
def test_bytes_that_are_no_plan_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="expected a plan that tierstore wrote"):
        Plan.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        Plan.load(tmp_path)


@given(content=st.binary(max_size=60), at=st.integers(0, 500))
def test_a_damaged_file_is_refused_or_still_a_plan(content: bytes, at: int) -> None:
    from tempfile import NamedTemporaryFile

    whole = json.dumps(PLAN.to_dict()).encode()
    with NamedTemporaryFile() as file:
        file.write(whole[:at] + content + whole[at + len(content) :])
        file.flush()
        try:
            plan = Plan.load(file.name)
        except ConfigError:
            return
    assert (plan.windows >= plan.shares - 1e-9).all()


def test_the_published_plan_is_one_of_the_demo_model_and_of_no_machine() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "smollm2.plan.json"
    plan = Plan.load(path)
    plan.check_model(30, 3, 9, 64)
    assert plan.window == pytest.approx(2.0, abs=0.01)
    assert (plan.windows.min(), plan.windows.max()) == (1.25, 3.25)
    assert plan.budgets is None
    assert plan.facts["documents"] == ["opticks.txt", "vim.txt", "rustbook.txt"]
    assert not {"/", "\\"} & set(path.read_text())


def test_a_plan_of_another_model_is_refused() -> None:
    PLAN.check_model(2, 3, 9, 64)
    for sizes in ((3, 3, 9, 64), (2, 1, 9, 64), (2, 3, 6, 64), (2, 3, 9, 128)):
        with pytest.raises(ConfigError, match="plan of 'tiny' with 2 layers, 3 KV heads"):
            PLAN.check_model(*sizes)
