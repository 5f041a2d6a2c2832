"""``tierstore plan``, and the measure of what heads give to blocks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_engine import DenseEngine
from tiny_models import llama, random_ids

from tierstore.adapters.attention.selectable import SelectableShare
from tierstore.adapters.cli import main
from tierstore.adapters.presets import PRESETS
from tierstore.adapters.transformers import attach_engine, geometry_of
from tierstore.policies.plan import Plan
from tierstore.traces.attention import AttentionTrace

FACTS = {
    "layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 16, "block_tokens": 4,
    "context_tokens": 160, "model": "made up", "document": "noise", "budget": 0.1,
    "selectable": [0.4, 0.3, 0.2, 0.1],
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    random = np.random.default_rng(0)
    scores = random.standard_normal((40, 4, 40)).cumsum(0).astype(np.float16)
    blocks = np.full((40, 4), 40, np.int32)
    nothing = np.zeros((40, 4), np.int32), np.empty(0, np.int32)
    made = AttentionTrace(FACTS, blocks, scores, np.arange(40, dtype=np.int32)[None], *nothing)
    path = tmp_path / "noise.trace"
    made.with_budget(0.1).save(path)
    return str(path)


def test_a_plan_is_made_and_shown(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    arguments = ["plan", "make", path, "--trace", trace, "--trace", trace, "--window", "2.5"]
    assert main([*arguments, "--per-head-budgets"]) == 0
    assert "2 layers, windows of 2." in capsys.readouterr().out
    plan = Plan.load(path)
    assert 2.2 < plan.window <= 2.5
    assert plan.budgets is not None
    assert main(["plan", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "plan for made up" in shown
    assert f"{plan.windows[1, 1]:.2f} for {plan.budgets[1, 1]:.2f}" in shown
    assert main(["plan", "show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan.to_dict()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["make", "{}/plan.json", "--trace", "{}/none"], "No such file"),
        (["make", "{}/no/plan.json", "--trace", "TRACE"], "cannot be written"),
        (["make", "{}/plan.json", "--trace", "TRACE", "--window", "0.3"], "at least 1 budget"),
        (["make", "{}/plan.json", "--trace", "TRACE", "--window", "1e300"], "at most 1e+09"),
        (["make", "{}/plan.json", "--trace", "TRACE", "--budget", "9" * 400], "budget='99"),
        (["make", "{}/plan.json", "--trace", "TRACE", "--budget", "x"], "budget='x'"),
        (["make", "{}/plan.json", "--trace", "{}"], "Is a directory"),
        (["make", "{}/plan.json", "--trace", "{}/" + "n" * 300], "File name too long"),
        (["make", "{}/" + "n" * 300, "--trace", "TRACE"], "File name too long"),
        (["show", "{}/none.json"], "No such file"),
        (["show", "{}/" + "n" * 300], "File name too long"),
    ],
)
def test_what_cannot_be_is_one_line_of_error(
    arguments: list[str],
    reason: str,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [each.replace("{}", str(tmp_path)).replace("TRACE", trace) for each in arguments]
    assert main(["plan", *filled]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--hysteresis", "much", "hysteresis='much'"),
        ("--plan", "none.json", "No such file"),
        ("--recalibrate", "0", "expected a whole number from 1 to"),
        ("--recalibrate", "9" * 23, "expected a whole number from 1 to 2147483647"),
        ("--recalibrate", "5", "no fast tier to share out; pass --fast and another"),
        ("--window", "inf", "window=inf: expected at least 1 budget and at most 1e+09"),
        ("--window", "1e300", "window=1e+300: expected"),
        ("--budget", "9" * 400, "<= 2147483647, for example 0.0625"),
        ("--max-new-tokens", "9" * 23, "max_new_tokens=99"),
    ],
)
def test_generate_refuses_at_once_what_no_model_could_do(
    option: str, value: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "text.txt"
    document.write_text("Some text.")
    asked = ["generate", "--document", str(document), "--question", "", "--fast", "1MiB"]
    assert main([*asked, option, value, "--model", "none"]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dram", "1MiB", "--window", "2"], "--window: there is no fast tier"),
        (["--dram", "1MiB", "--recalibrate", "5"], "no fast tier to share out"),
        (["--dram", "1MiB", "--plan", "a.plan"], "no fast tier to share out"),
        (["--fast", "1MiB", "--plan", "a.plan"], "pass --fast and another tier"),
        (["--fast", "1MiB", "--dram", "1MiB", "--recalibrate", "5"], "model='none'"),
    ],
)
def test_a_window_needs_a_fast_tier_and_sharing_it_another(
    options: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Recalibration needs no plan: it then learns from what the run itself selects."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Some text.")
    Plan(np.full((2, 2), 2.0), 4, 16).save("a.plan")
    asked = ["generate", "--document", "text.txt", "--question", "", "--model", "none"]
    assert main([*asked, *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    Plan(np.full((2, 2), 2.0), 4, 16).save(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "show", path, "--plot", str(tmp_path / "plan.png")]) == 2
    assert "pip install 'tierstore[plot]'" in capsys.readouterr().err


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the extra plot")
    path, picture = str(tmp_path / "plan.json"), tmp_path / "plan.png"
    Plan(np.full((2, 2), 2.0), 4, 16, np.ones((2, 2))).save(path)
    assert main(["plan", "show", path, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "show", path, "--plot", str(tmp_path / "no" / "plan.png")]) == 2


def test_the_selectable_share_is_that_of_full_attention() -> None:
    """Against the weights that transformers itself computes, eagerly."""
    model = llama(attn_implementation="eager")
    ids = random_ids(1, 150)
    preset = PRESETS["exact"]
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions
        measured = SelectableShare(DenseEngine(geometry_of(model)), preset)
        with attach_engine(model, measured) as cache:
            model(input_ids=ids[:, :148], **cache.kwargs, use_cache=True)
            for token in (148, 149):
                model(input_ids=ids[:, token : token + 1], **cache.kwargs, use_cache=True)
            found = measured.shares
    assert weights is not None
    for layer, of_layer in enumerate(weights):
        expected = torch.zeros(2, dtype=torch.float64)
        for token in (148, 149):
            row = of_layer[0, :, token, : token + 1].double()
            expected += row[:, 4 : token + 1 - 64].sum(1).unflatten(0, (2, 2)).mean(1) / 2
        torch.testing.assert_close(found[layer], expected, atol=1e-5, rtol=1e-4)


def test_a_name_that_looks_like_markup_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.plan")
    Plan(np.ones((2, 2)), 4, 64, facts={"model": "[/bold]x"}).save(path)
    assert main(["plan", "show", path]) == 0
    assert "[/bold]x" in capsys.readouterr().out


def test_a_name_that_cannot_be_printed_or_steers_a_terminal_is_shown_without_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.plan")
    Plan(np.ones((2, 2)), 4, 64, facts={"model": "\ud800x\x1b[31m"}).save(path)
    assert main(["plan", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "plan for \ufffdx\ufffd[31m: windows" in shown
    shown.encode()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layers": [2]}, "fact layers: expected a whole number from 1 to 2147483647, found [2]"),
        ({"query_heads": True}, "fact query_heads: expected a whole number"),
        ({"model": float("nan")}, "fact model: expected text, found nan"),
        ({"selectable": ["a"] * 4}, "fact selectable: expected a share of attention for each of 4"),
        ({"selectable": None}, "fact selectable: expected a share of attention"),
        ({"budget": None}, "says nothing of a budget; pass --budget"),
        ({"own": float("nan")}, "facts: expected what JSON can hold"),
    ],
)
def test_wrong_facts_are_refused_with_the_name_of_the_file(
    facts: dict[str, object],
    reason: str,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = AttentionTrace.load(Path(trace))
    replace(made, facts={**made.facts, **facts}).save(Path(trace))
    plan = str(tmp_path / "a.plan")
    assert main(["plan", "make", plan, "--trace", trace, "--per-head-budgets"]) == 2
    assert capsys.readouterr().err.startswith(f"tierstore: error: {trace}: {reason}")
    assert [path.name for path in tmp_path.iterdir()] == ["noise.trace"]


def test_a_trace_without_steps_is_refused_with_the_name_of_the_file(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = AttentionTrace.load(Path(trace))
    nothing = np.zeros((0, 4), np.int32)
    scores, ids = made.unit_scores[:0], made.ids[:0]
    replace(made, blocks=nothing, counts=nothing, unit_scores=scores, ids=ids).save(Path(trace))
    assert main(["plan", "make", str(tmp_path / "a.plan"), "--trace", trace]) == 2
    assert f"{trace}: expected at least 1 steps, found 0" in capsys.readouterr().err
