"""The benchmark of indexes on a tiny model, and what it says of indexes that are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from bench_schema import as_json

from tierstore.adapters.capture import capture
from tierstore.adapters.cli import main
from tierstore.benchmarks import index
from tierstore.benchmarks.index import Plan, measure, measure_captures
from tierstore.benchmarks.index_plot import draw
from tierstore.benchmarks.index_quality import FULL, distances, questions
from tierstore.benchmarks.indexes import BUDGETS, INDEXES, Candidate, Row, rows_of
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.recall import Truth, measure_recall
from tierstore.errors import ConfigError
from tierstore.indexers import ExactIndex, NewTokens, Representatives, ScoringIndex
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel
    from tierstore.traces.capture import Capture

PROMPT, STEPS = 400, 12


class FirstBlocks(ScoringIndex):
    """Prefers the first blocks, whatever the query."""

    def represent(self, new: NewTokens) -> Representatives:
        return Representatives({"vectors": new.pages(self.page_tokens)[:, :, 0] * 0})


def silent(progress: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def seen(tiny_model: LoadedModel) -> Capture:
    return capture(tiny_model.model, real_text(tiny_model.tokenizer, PROMPT + STEPS), STEPS)


def true_mass(seen: Capture, layer: int, tokens: int) -> np.ndarray:
    """Attention [H, T, tokens] to the tokens behind the sinks, in float64."""
    keys = to_tensor(seen.keys[layer]).double().numpy()
    queries = to_tensor(seen.queries[layer]).double().numpy()
    heads, group, steps, _ = queries.shape
    mass = np.zeros((heads, steps, tokens))
    for head in range(heads):
        for step in range(steps):
            for query in queries[head, :, step]:
                logits = keys[head, : PROMPT + step + 1] @ query * seen.scale
                weights = np.exp(logits - logits.max())
                mass[head, step] += (weights / weights.sum())[4 : 4 + tokens] / group
    return mass


@pytest.mark.parametrize("block_tokens", [1, 4])
def test_mass_and_recall_of_a_known_selection(seen: Capture, block_tokens: int) -> None:
    """The index scores all blocks alike, so that it takes the first ones."""
    truth = Truth(seen)
    tokens = (PROMPT - 4 - 64) // 16 * 16
    assert truth.tokens == tokens
    found = measure_recall(truth, Candidate("", FirstBlocks), block_tokens, [0.125])
    count = round(0.125 * PROMPT / block_tokens)
    masses, recalls = [], []
    for layer in range(3):
        mass = true_mass(seen, layer, tokens)
        blocks = mass.reshape(2, STEPS, -1, block_tokens).sum(-1)
        best = np.sort(mass, -1)[..., -round(0.125 * PROMPT) :].sum((1, 2))
        masses += list(blocks[..., :count].sum((1, 2)) / best)
        top = np.argsort(-blocks, -1)[..., :count]
        recalls += list((top < count).mean((1, 2)))
    np.testing.assert_allclose(found.mass[0.125], masses, rtol=1e-4)
    np.testing.assert_allclose(found.recall[0.125], recalls, atol=1e-9)
    assert found.selected[0.125] == [1.0] * 6
    assert (len(found.build_seconds), len(found.select_seconds)) == (3, STEPS)


def test_bytes_are_those_of_the_index_for_each_token_and_head(seen: Capture) -> None:
    truth = Truth(seen)
    found = measure_recall(truth, Candidate("", ExactIndex), 4, [0.125])
    # Keys of 16 float32, and for each row two numbers of 4 bytes.
    assert found.nbytes == pytest.approx(64 + 8 / truth.tokens)


def test_perfect_selection_of_tokens_captures_nearly_all(seen: Capture) -> None:
    found = measure_recall(Truth(seen), INDEXES["exact"], 1, BUDGETS)
    for budget in BUDGETS:
        assert min(found.mass[budget]) > 0.95
        assert max(found.mass[budget]) < 1 + 1e-5


def test_a_prompt_without_anything_to_select_is_refused(tiny_model: LoadedModel) -> None:
    short = capture(tiny_model.model, real_text(tiny_model.tokenizer, 130), 2)
    with pytest.raises(ConfigError, match="a prompt of 128 tokens: expected at least 196"):
        Truth(short)


def test_with_the_whole_context_selected_nothing_is_lost(tiny_model: LoadedModel) -> None:
    """So every index has absorbed the text as it was, tokens as well as blocks."""
    text = real_text(tiny_model.tokenizer, PROMPT + STEPS)
    rows = rows_of(INDEXES)
    kl, seen = distances(silent, tiny_model, text, STEPS, rows, INDEXES, [1.0, 0.02])
    assert seen.prompt_tokens == PROMPT
    for row in rows:
        assert len(kl[row.at(1.0)]) == STEPS
        # InfiniGen selects what is near the best, however large the budget.
        assert row.name == "partial-columns" or max(kl[row.at(1.0)]) < 1e-4, row
        # ShadowKV's 48 outliers are the whole of a text this short.
        assert row.name == "shadowkv" or max(kl[row.at(0.02)]) > 1e-3


def test_measures_every_row_at_every_budget(tiny_model: LoadedModel, tmp_path: Path) -> None:
    table = {"exact": INDEXES["exact"], "first": Candidate("the first blocks", FirstBlocks, (4,))}
    plan = Plan(rows_of(table), table, budgets=BUDGETS[:2])
    text = real_text(tiny_model.tokenizer, PROMPT + STEPS)
    findings = measure(
        silent, tiny_model, [text], plan, steps=STEPS, numbers_tokens=600, numbers_texts=1
    )
    data = as_json(findings)
    everything = {row.at(budget) for row in plan.rows for budget in plan.budgets}
    for name in ("mass", "recall", "selected", "KL"):
        assert set(data["measures"][name]["values"]) == everything
    for name in ("exact match", "log-probability"):
        assert set(data["measures"][name]["values"]) == everything | {FULL}
    for name in ("bytes", "build", "select"):
        assert set(data["measures"][name]["values"]) == set(map(str, plan.rows))
    assert set(data["configurations"]) == set(map(str, plan.rows))
    draw(findings, plan.rows, plan.budgets, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_questions_ask_for_each_number_of_their_text(tiny_model: LoadedModel) -> None:
    asked = questions(tiny_model, 1_200, 2)
    assert len(asked) == 8
    for each in asked:
        prompt = str(tiny_model.tokenizer.decode(each.prompt))
        answer = str(tiny_model.tokenizer.decode(each.answer))
        assert prompt.count(f" is: {answer}.") == 1
        city = prompt.rsplit(" for ", 1)[1].removesuffix(" is: ")
        assert f"{city} is: {answer}." in prompt
        assert prompt.endswith(f"numbers for {city} is: ")
    assert len({tuple(each.prompt) for each in asked}) == 8


def test_an_own_model_is_measured_through_captures(
    seen: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "a.npz", tmp_path / "a.json"
    seen.save(path)
    arguments = ["bench", "index", "--captures", f"{path},{path}", "--indexes", "exact"]
    assert main([*arguments, "--json", str(target)]) == 0
    assert "exact, blocks of 4" in capsys.readouterr().out
    findings = measure_captures(silent, [seen], Plan([Row("exact", 1)], parts=["mass"]))
    assert set(as_json(findings)["measures"]) == {
        "mass", "recall", "selected", "bytes", "build", "select",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--indexes", "exact,magic"], "indexes: 'magic' is unknown: expected some of exact"),
        (["--parts", "speed"], "parts: 'speed' cannot be measured: expected mass, kl, numbers"),
        (["--captures", "a.npz", "--parts", "kl"], "'kl' cannot be measured of captures"),
        (["--documents", "missing.txt"], "document='missing.txt'"),
        (["--captures", "missing.npz"], "capture='missing.npz'"),
        (["--plot", "missing/a.png"], "plot='missing/a.png'"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "index", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_document_that_is_too_short_is_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="the document has 5 tokens, and 100 are needed"):
        index.token_lists(tiny_model, 100, ["short"])
    (tokens,) = index.token_lists(tiny_model, 100, ["long " * 50])
    assert tiny_model.tokenizer.decode(tokens) == "long " * 20
