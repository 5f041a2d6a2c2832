"""``tierstore trace record``: what it writes, and what it refuses before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from tiny_models import llama

from tierstore.adapters.cli import main, recording
from tierstore.adapters.models import LoadedModel
from tierstore.traces.attention import AttentionTrace

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LanguageModel

TEXT = "All work and no play makes Jack a dull boy. " * 20
SHORT = ["--tokens", "300", "--steps", "40", "--dtype", "float32"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small model whatever the name, in a folder with a document."""
    model = cast("LanguageModel", llama(vocab_size=256, max_position_embeddings=600))
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    monkeypatch.setattr(recording, "load_model", lambda *_: loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def record(*options: str) -> int:
    return main(["trace", "record", "a.trace", "--document", "text.txt", *SHORT, *options])


def test_a_document_becomes_a_trace(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record("--budget", "10%", "--block-tokens", "2") == 0
    assert "a.trace: 40 steps of 6 segments, " in capsys.readouterr().out
    trace = AttentionTrace.load(tiny / "a.trace")
    selectable = trace.facts["selectable"]
    assert len(selectable) == trace.segments
    assert all(0 < share < 1 for share in selectable)
    assert trace.facts == {
        "model": "tiny",
        "dtype": "float32",
        "layers": 3,
        "kv_heads": 2,
        "query_heads": 4,
        "head_dim": 16,
        "value_size": 16,
        "selectable": selectable,
        "document": "text.txt",
        "preset": "exact",
        "budget": 0.1,
        "block_tokens": 2,
        "context_tokens": 300,
        "is_generated": False,
    }
    # Sinks and local window are no blocks; a tenth of 301 tokens is 16 blocks of two.
    assert trace.blocks[0].tolist() == [(300 - 4 - 64) // 2] * 6
    assert trace.counts[0].tolist() == [16] * 6
    assert trace.blocks[-1, 0] > trace.blocks[0, 0]


def test_a_generated_text_differs_from_a_given_one(tiny: Path) -> None:
    assert record() == 0
    forced = AttentionTrace.load(tiny / "a.trace")
    assert record("--generate") == 0
    generated = AttentionTrace.load(tiny / "a.trace")
    assert generated.facts["is_generated"]
    assert not np.array_equal(forced.unit_scores[-1], generated.unit_scores[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens=0: expected a whole number from 1 to"),
        (["--steps", "-1"], "steps=-1: expected a whole number from 1 to"),
        (["--block-tokens", "0"], "block_tokens=0: expected a whole number from 1 to"),
        (["--block-tokens", "301"], "block_tokens=301: expected blocks that are shorter"),
        (["--block-tokens", "9" * 20], "block_tokens=99999999999999999999: expected a whole"),
        (["--tokens", "9" * 20], "tokens=99999999999999999999: expected a whole number from 1 to"),
        (["--budget", "120%"], "budget='120%': expected a share"),
        (["--dtype", "int8"], "dtype='int8': expected one of auto, bfloat16"),
        (["--preset", "none"], "preset='none': expected one of"),
        (["--tokens", "500"], "the document has"),
        (["--preset", "full"], "expected one that scores all blocks"),
    ],
)
def test_bad_arguments_leave_nothing(
    options: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "text.txt").write_text(TEXT[:520])
    assert record(*options) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tiny.iterdir()] == ["text.txt"]


def test_a_trace_that_cannot_be_written_is_refused_first(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("missing/a.trace", "."):
        arguments = ["trace", "record", target, "--document", "text.txt", *SHORT]
        assert main(arguments) == 2
        assert f"trace={target!r}: " in capsys.readouterr().err


def test_a_trace_may_have_the_longest_name_of_all(tiny: Path) -> None:
    """What is written first has a name, too, which must not be longer: all work would be lost."""
    name = "n" * 255
    assert main(["trace", "record", name, "--document", "text.txt", *SHORT]) == 0
    assert AttentionTrace.load(tiny / name).steps == 40
    assert sorted(path.name for path in tiny.iterdir()) == [name, "text.txt"]
