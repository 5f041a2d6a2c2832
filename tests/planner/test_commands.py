"""``tierstore plan`` without an action, ``roofline`` and ``profile``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, cast

import pytest
from byte_tokenizer import byte_tokenizer
from tiny_models import llama

from tierstore.adapters.cli import main, profiling
from tierstore.adapters.cli.prediction import parse_tokens
from tierstore.adapters.models import LoadedModel
from tierstore.adapters.planner.systems import SYSTEMS
from tierstore.errors import ConfigError
from tierstore.hardware import PRESETS, Hardware
from tierstore.policies.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LanguageModel

ASKED = ["plan", "--model", "llama3-8b", "--gpu", "l20", "--dram", "100GiB", "--context", "122k"]


def test_every_system_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*ASKED, "--batch", "8", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert rows == list(SYSTEMS)
    assert "out of │ device memory" in shown
    assert "kvdrive: window of " in shown
    assert "--dram 100.0GiB --disk DIR" in shown
    assert "NVIDIA L20 data sheet" in shown
    content = json.loads(path.read_text())
    assert content["schema"] == 1
    assert content["load"]["context"] == 122 * 1024
    assert [each["system"] for each in content["predictions"]] == list(SYSTEMS)
    assert Hardware.from_dict(content["hardware"]).host.memory_bytes == 100 << 30


def test_what_does_not_fit_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--batch", "4096"]) == 0
    assert "best: out of device memory; pass fewer sequences or tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["plan"], "expected --model and --gpu"),
        (["plan", "--model", "llama3-8b"], "expected --model and --gpu"),
        (["plan", "--model", "gpt", "--gpu", "l20"], "model='gpt': expected one of llama3-8b"),
        (["plan", "--model", "smollm2", "--gpu", "tpu"], "gpu='tpu': expected one of reference"),
        ([*ASKED[:-1], "12kb"], "context='12kb': expected tokens"),
        ([*ASKED[:-1], "0"], "context='0': expected tokens"),
        ([*ASKED, "--batch", "0"], "batch=0: expected a whole number from 1"),
        ([*ASKED, "--budget", "200%"], "budget='200%'"),
        ([*ASKED, "--dram", "much"], "dram='much'"),
        ([*ASKED, "--json", "missing/plan.json"], "json='missing/plan.json'"),
        ([*ASKED, "show", "plan.json"], "only tierstore plan without an action takes that"),
        (["roofline", "--gpu", "tpu"], "gpu='tpu': expected one of"),
        (["roofline", "--gpu", "l20", "--plot", "roof.txt"], "plot='roof.txt'"),
        (["roofline", "--gpu", "l20", "--json", "missing/a.json"], "json='missing/a.json'"),
    ],
)
def test_what_cannot_be_is_one_line_of_error(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("{", "[]", '{"hardware": {}}', "null"):
        path = tmp_path / "here.json"
        path.write_text(content)
        assert main(["plan", "--model", "smollm2", "--gpu", str(path)]) == 2
        assert "tierstore roofline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("122k", 124_928), ("8192", 8_192), ("1M", 1 << 20), (" 4K ", 4_096)]
)
def test_tokens_are_written_with_k_and_m(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "9" * 30, "4096M"])
def test_what_are_no_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected tokens from 1"):
        parse_tokens(text)


def test_a_roofline_is_shown_drawn_and_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, picture = tmp_path / "h20.json", tmp_path / "h20.png"
    arguments = ["roofline", "--gpu", "h20", "--json", str(target), "--plot", str(picture)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "device, 80% hits" in shown
    assert "the host in place wins below P" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(target.read_text())
    assert Hardware.from_dict(content["hardware"]) == PRESETS["h20"]
    assert set(content["crossing"]) == {"0%", "80%", "90%"}
    assert main(["plan", "--model", "qwen3-8b", "--gpu", str(target)]) == 0
    assert "qwen3-8b on h20" in capsys.readouterr().out


def test_the_commands_are_added_without_what_takes_long_to_import() -> None:
    program = (
        "import sys, tierstore.adapters.cli; "
        "sys.exit(bool({'torch', 'numba', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


TEXT = "All work and no play makes Jack a dull boy. " * 20
SHORT = ["--tokens", "400", "--steps", "16", "--dtype", "float32", "--batch", "2"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small model whatever the name, in a folder with a document."""
    model = cast("LanguageModel", llama(vocab_size=256, max_position_embeddings=600))
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    monkeypatch.setattr(profiling, "load_model", lambda *_: loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_a_profile_is_a_plan_with_all_that_was_tried(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", "p.json", "--document", "text.txt", *SHORT]
    assert main([*arguments, "--dram", "64KiB", "--json", "tried.json"]) == 0
    output = capsys.readouterr()
    assert "p.json: 3 layers, windows of " in output.out
    assert "micro-batches of 2" in output.err
    plan = Plan.load("p.json")
    tried = json.loads((tiny / "tried.json").read_text())
    assert plan.tuning is not None
    assert plan.tuning.micro_batch == tried["micro_batch"] in {1, 2}
    assert plan.tuning.tokens_per_centroid == tried["tokens_per_centroid"]
    assert plan.pinned is not None
    assert plan.pinned.shape == plan.windows.shape
    # 64 KiB are so many budgets of 25 tokens of two heads of 16 float32 for 6 heads.
    assert plan.pinned.mean() <= 65536 / (25 * 2 * 16 * 4 * 6) + 1e-9
    assert set(tried["trials"]) == {"tokens per centroid", "window", "micro-batch"}
    assert sorted(path.name for path in tiny.iterdir()) == ["p.json", "text.txt", "tried.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "4"], "steps=4: expected at least 16"),
        (["--batch", "0"], "batch=0: expected a whole number from 1"),
        (["--window", "0.5"], "at least 1 budget"),
        (["--budget", "x"], "budget='x'"),
        (["--dram", "x"], "dram='x'"),
        (["--json", "missing/a.json"], "json='missing/a.json'"),
        (["--preset", "none"], "preset='none'"),
    ],
)
def test_bad_arguments_of_a_profile_leave_nothing(
    options: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "p.json", "--document", "text.txt", *SHORT, *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tiny.iterdir()] == ["text.txt"]
