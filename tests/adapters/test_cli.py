"""The `tierstore` command: what it prints, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from tierstore.adapters.attention.prefixes import Prefixes
from tierstore.adapters.cli import json_file, main
from tierstore.adapters.cli.outcome import Outcome
from tierstore.adapters.cli.text import visible
from tierstore.adapters.documents import Document
from tierstore.errors import ConfigError
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIERSTORE = str(Path(sys.executable).parent / "tierstore")
# What would make rich believe in a terminal, or take it for another one.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in {"FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"}
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SMALL = ("--dtype", "float32", "--dram", "8MiB", "--question", "Why?")


def command(*arguments: str | Path) -> list[str]:
    return [TIERSTORE, "generate", *map(str, arguments)]


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def files_under(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that never ends its text, and a tokenizer with a token for each byte."""
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {
        symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    llama(vocab_size=len(vocabulary), max_position_embeddings=8_192).save_pretrained(directory)
    return directory


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A text of 1,200 characters, in a folder that holds nothing else."""
    path = tmp_path / "document.txt"
    path.write_text("All work and no play. " * 55)
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Call `main` here, where torch is imported already: exit code, standard output and error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


# A run


def test_a_run_prints_answer_tables_and_comparison(model_directory: Path, document: Path) -> None:
    disk, target = document.parent / "kv", document.parent / "run.json"
    done = run(
        *("--document", document, *SMALL, "--budget", "100%", "--fast", "2MiB", "--disk", disk),
        *("--model", model_directory, "--max-new-tokens", "20", "--compare", "--json", target),
        cwd=document.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert CONTROL.search(done.stdout) is None
    assert done.stdout.startswith("Why?\n\n")
    for name in ("fast", "ordinary memory (no GPU)", "dram", "disk", "full attention", "prefill"):
        assert name in done.stdout
    assert "float32, on cpu" in done.stdout
    assert "same tokens: yes, all 20" in done.stdout
    assert "KL(full || tierstore) of the next token: mean 0.0000 nats" in done.stdout
    assert files_under(document.parent) == ["document.txt", "run.json"]
    record = json.loads(target.read_text())
    assert record["comparison"]["full"]["tokens"] == record["generation"]["tokens"]
    assert visible(record["generation"]["answer"]) in done.stdout


NUMBER, INTEGER, TEXT, LIST = (int, float), int, str, list
GENERATION: dict[str, object] = {
    "answer": TEXT,
    "tokens": LIST,
    "prompt_tokens": INTEGER,
    "prefill_seconds": NUMBER,
    "prefill_tokens_per_second": NUMBER,
    "first_step_seconds": NUMBER,
    "decode_tokens_per_second": NUMBER,
    "median_step_seconds": NUMBER,
    "step_seconds": LIST,
}
TIER: dict[str, object] = {
    "name": TEXT,
    "medium": TEXT,
    "limit_bytes": (int, type(None)),
    "peak_bytes": INTEGER,
    "hits": INTEGER,
    "bytes_read": INTEGER,
    "bytes_written": INTEGER,
    "evictions": INTEGER,
    "used_for": dict,
}
RECORD: dict[str, object] = {
    "schema": INTEGER,
    "tierstore": TEXT,
    "model": {"name": TEXT, "device": TEXT, "dtype": TEXT},
    "question": TEXT,
    "generation": GENERATION,
    "loaded_tokens": INTEGER,
    "tiers": {
        "preset": TEXT,
        "budget": NUMBER,
        "context_tokens": INTEGER,
        "block_tokens": INTEGER,
        "window": NUMBER,
        "selected_blocks": INTEGER,
        "hit_rate": NUMBER,
        "index_bytes": INTEGER,
        "kernels": TEXT,
        "tiers": [TIER],
    },
    "fact": {"expected": TEXT, "found": bool, "full_found": bool},
    "comparison": {
        "full": GENERATION,
        "full_kv_bytes": INTEGER,
        "same_tokens": bool,
        "first_difference": (int, type(None)),
        "mean_kl": NUMBER,
        "kl": LIST,
        "prefill_speedup": NUMBER,
        "decode_speedup": NUMBER,
        "median_step_speedup": NUMBER,
    },
}


def assert_form(record: object, form: object) -> None:
    """`record` has the keys and types of `form`; a list has items of its one form."""
    if isinstance(form, dict):
        assert isinstance(record, dict)
        assert record.keys() >= form.keys()
        for key, part in form.items():
            assert_form(record[key], part)
    elif isinstance(form, list):
        assert isinstance(record, list)
        for item in record:
            assert_form(item, form[0])
    else:
        assert isinstance(form, type | tuple)
        assert isinstance(record, form)


def test_the_demo_model_answers_from_the_built_in_document(tmp_path: Path) -> None:
    """The planted fact is found by full attention; what sparse attention finds is only reported."""
    done = run(
        *("--document", "builtin", "--question", "builtin", "--budget", "6.25%"),
        *("--fast", "16MiB", "--dram", "64MiB", "--disk", "kv", "--max-new-tokens", "12"),
        *("--compare", "--json", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "One of the special magic numbers for Oslo is: " in done.stdout
    assert files_under(tmp_path) == ["run.json"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert_form(record, RECORD)
    assert record["fact"]["expected"] == "58241"
    assert record["fact"]["full_found"]
    assert record["generation"]["prompt_tokens"] > 5_900
    assert len(record["comparison"]["kl"]) == 11
    names = [tier["name"] for tier in record["tiers"]["tiers"]]
    assert names == ["fast", "dram", "disk"]


def test_a_run_without_comparison_says_so_by_null(
    call: Callable[..., tuple[int, str, str]], model_directory: Path, document: Path
) -> None:
    target = document.parent / "run.json"
    options = ("--model", model_directory, "--max-new-tokens", "1", "--json", target)
    code, out, err = call("generate", "--document", document, *SMALL, *options)
    assert (code, err) == (0, "")
    assert "full attention" not in out
    record = json.loads(target.read_text())
    assert record["comparison"] is None
    assert record["fact"] is None
    assert record["generation"]["decode_tokens_per_second"] is None
    assert len(record["generation"]["tokens"]) == 1


def test_limits_may_be_shares_of_all_keys_and_values(
    call: Callable[..., tuple[int, str, str]], model_directory: Path, document: Path
) -> None:
    target = document.parent / "run.json"
    config = json.loads((model_directory / "config.json").read_text())
    each = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    code, _, err = call(
        *("generate", "--document", document, "--question", "Why?", "--dtype", "float32"),
        *("--fast", "75%", "--dram", "100%", "--disk", document.parent / "kv"),
        *("--model", model_directory, "--max-new-tokens", "8", "--json", target),
    )
    assert (code, err) == (0, "")
    record = json.loads(target.read_text())
    whole = (record["generation"]["prompt_tokens"] + 8) * each
    limits = [tier["limit_bytes"] for tier in record["tiers"]["tiers"]]
    assert limits[:2] == [whole * 3 // 4, whole]


def test_a_second_run_loads_what_the_first_one_computed(
    call: Callable[..., tuple[int, str, str]],
    model_directory: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = Prefixes.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "disk", "32MiB")
    target, place = document.parent / "run.json", document.parent / "prefixes"
    options = ("--model", model_directory, "--max-new-tokens", "3", "--json", target)
    records = []
    for _ in range(2):
        done = call("generate", "--document", document, *SMALL, *options, "--prefixes", place)
        assert done[0::2] == (0, "")
        records.append(json.loads(target.read_text()))
    first, second = records
    assert first["loaded_tokens"] == 0
    assert second["loaded_tokens"] > 1_000
    computed = second["generation"]["prompt_tokens"] - second["loaded_tokens"]
    assert 2 <= computed < 66
    assert (
        f"prefixes: {second['loaded_tokens']:,} tokens of the prompt were loaded, {computed} "
        "computed" in done[1]
    )
    assert second["generation"]["tokens"] == first["generation"]["tokens"]


def test_on_a_terminal_progress_is_shown(model_directory: Path, document: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ("--document", document, *SMALL, "--model", model_directory)
    process = subprocess.Popen(
        command(*arguments, "--max-new-tokens", "3"),
        env=ENVIRONMENT | {"TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = read_all(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "loading" in shown
    assert re.search(r"prefill .*3/3", shown)
    assert CONTROL.search(out) is None


def read_all(terminal: int) -> str:
    """What a process writes to a terminal until it ends."""
    shown = b""
    # A terminal without a writer reads as an error instead of an end.
    while select.select([terminal], [], [], 120)[0]:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:
            break
    os.close(terminal)
    return shown.decode()


# What is refused


MODELLESS = {
    "budget of zero": ("--budget 0", "budget='0': expected a share of the context in (0, 1]"),
    "budget above one": ("--budget 1.5", "budget='1.5': expected a share"),
    "budget above all": ("--budget 101%", "budget='101%': expected a share"),
    "unknown unit": ("--fast 16XB", "fast='16XB': expected a number"),
    "negative size": ("--dram -1", "dram='-1': expected a number"),
    "no size": ("--dram 0", "dram='0': expected more than zero bytes"),
    "small window": ("--window 0.5", "window=0.5: expected at least 1 budget"),
    "window that is no number": ("--window wide", "argument --window: invalid float value"),
    "no new tokens": ("--max-new-tokens 0", "max_new_tokens=0: expected a whole number from 1 to"),
    "unknown dtype": ("--dtype int8", "dtype='int8': expected one of auto, bfloat16, float16"),
    "more than all": ("--dram 120%", "dram='120%': expected a share above 0% and up to 100%"),
    "missing document": ("--document none.txt", "document='none.txt': No such file"),
    "builtin question": ("--question builtin", "question='builtin': only the built-in document"),
    "disk in no directory": ("--disk no/kv", "disk='no/kv': its parent directory 'no' does not"),
    "disk that is a file": ("--disk document.txt", "disk='document.txt': expected a directory"),
    "nothing to keep": ("--keep", "keep, disk codec: there is no disk tier"),
    "JSON in no directory": ("--json no/run.json", "json='no/run.json': cannot be written (No"),
    "JSON that is a directory": ("--json .", "json='.': exists and is no file"),
    "unknown option": ("--fastest 1GiB", "unrecognized arguments: --fastest"),
}


@pytest.mark.parametrize(("options", "message"), MODELLESS.values(), ids=MODELLESS)
def test_bad_input_ends_in_one_sentence_before_a_model_is_loaded(
    document: Path, options: str, message: str
) -> None:
    arguments = ("--document", document.name, *SMALL, "--model", "none", *options.split())
    done = run(*arguments, cwd=document.parent)
    assert_refused(done, message)
    assert files_under(document.parent) == ["document.txt"]


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("tierstore: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_no_memory_tier_is_refused(document: Path) -> None:
    options = ("--document", document, "--question", "Why?", "--disk", "kv")
    done = run(*options, cwd=document.parent)
    assert_refused(done, "no memory tier: pass --fast, --dram or both")
    assert files_under(document.parent) == ["document.txt"]


def test_a_missing_command_is_refused(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = call()
    assert (code, out) == (2, "")
    assert err == (
        "tierstore: error: the following arguments are required: command; see tierstore --help\n"
    )


WITH_TORCH = {
    "unknown preset": ("--preset none", "preset='none': expected one of kvdrive"),
    "unknown device": ("--device abacus", "device='abacus': not usable here"),
    "unknown model": ("--model none", "model='none': no such file or directory"),
    "long text": ("--max-new-tokens 7000", "expected at most 8,192 together, the model's context"),
    "small fast tier": ("--fast 8KiB --disk kv", "fast: "),
    "small DRAM tier": ("--dram 64KiB", "dram: "),
}


@pytest.mark.parametrize(("options", "message"), WITH_TORCH.values(), ids=WITH_TORCH)
def test_what_cannot_be_served_ends_in_one_sentence(
    call: Callable[..., tuple[int, str, str]],
    model_directory: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(document.parent)
    arguments = ("--document", document, *SMALL, "--model", model_directory, *options.split())
    code, _, err = call("generate", *arguments, "--json", "run.json")
    assert code == 2
    assert err.startswith(f"tierstore: error: {message}" if message.endswith(": ") else "tierstore")
    assert message in err
    assert err.count("\n") == 1
    assert files_under(document.parent) == ["document.txt"]


def test_a_model_that_cannot_be_attached_is_refused(
    call: Callable[..., tuple[int, str, str]], model_directory: Path, document: Path, tmp_path: Path
) -> None:
    """The tokenizer is that of the other model; only the weights and their kind differ."""
    strange = tmp_path / "mamba"
    shutil.copytree(model_directory, strange)
    MambaForCausalLM(
        MambaConfig(vocab_size=256, hidden_size=16, state_size=4, num_hidden_layers=1)
    ).save_pretrained(strange)
    code, _, err = call("generate", "--document", document, *SMALL, "--model", strange)
    assert code == 2
    assert err.startswith("tierstore: error: MambaForCausalLM cannot be attached: ")
    assert err.count("\n") == 1


def test_without_transformers_the_extra_is_named(document: Path) -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tierstore.adapters.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command("--document", document, *SMALL)[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert_refused(done, "pip install 'tierstore[transformers]'")


def limit_files_to_a_mebibyte() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_full_disk_ends_in_one_sentence(model_directory: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for it: preallocation fails in the same way."""
    long = tmp_path / "document.txt"
    long.write_text("All work and no play. " * 200)
    done = subprocess.run(
        command("--document", long, *SMALL, "--model", model_directory, "--disk", "kv"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit_files_to_a_mebibyte,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("tierstore: error: disk: no ")
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert files_under(tmp_path) == ["document.txt"]


# Ends before the end


@pytest.fixture
def running(model_directory: Path, document: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with its files in ``kv``, in the middle of a long answer."""
    process = subprocess.Popen(
        command(
            *("--document", document, *SMALL, "--model", model_directory),
            *("--disk", document.parent / "kv", "--max-new-tokens", "6900"),
        ),
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # Far enough into the answer that no kernel is being compiled: that drops a signal's exception.
    process.stdout.read(len("Why?\n\n") + 20)
    yield process
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_run_leaves_nothing(
    running: subprocess.Popen[str], document: Path, number: signal.Signals, code: int
) -> None:
    assert [path.name for path in (document.parent / "kv").rglob("blocks")]
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (code, "")
    assert files_under(document.parent) == ["document.txt"]


def test_after_a_killed_run_the_next_one_leaves_nothing(
    running: subprocess.Popen[str],
    call: Callable[..., tuple[int, str, str]],
    model_directory: Path,
    document: Path,
) -> None:
    disk = document.parent / "kv"
    running.kill()
    running.communicate(timeout=60)
    assert [path.name for path in disk.rglob("blocks")]
    options = ("--model", model_directory, "--disk", disk, "--max-new-tokens", "1")
    code, _, err = call("generate", "--document", document, *SMALL, *options)
    assert (code, err) == (0, "")
    assert not list(disk.iterdir())


def test_a_reader_that_goes_away_ends_the_run(
    running: subprocess.Popen[str], document: Path
) -> None:
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    assert running.wait(timeout=60) == 128 + signal.SIGPIPE
    assert running.stderr.read() == ""
    assert files_under(document.parent) == ["document.txt"]


# The command itself


@pytest.mark.parametrize("arguments", ["--version", "--help", "generate --help"])
def test_help_comes_without_importing_torch(arguments: str) -> None:
    program = (
        "import sys; from tierstore.adapters.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numba', 'rich', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tierstore" in done.stdout


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"tierstore {metadata.version('tierstore')}\n"


CONTRIBUTION = """
def add_command(subparsers):
    parser = subparsers.add_parser("greet", help="say something kind")
    parser.add_argument("name")
    parser.set_defaults(run=lambda options: print("hello", options.name))
"""


@pytest.fixture
def contributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that adds the command ``greet``, and one that is broken."""
    (tmp_path / "contribution.py").write_text(CONTRIBUTION)
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        metadata.EntryPoint("greet", "contribution:add_command", "tierstore.commands"),
        metadata.EntryPoint("broken", "contribution:missing", "tierstore.commands"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)


@pytest.mark.usefixtures("contributed")
def test_packages_add_commands(call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("greet", "Ada") == (0, "hello Ada\n", "")


@pytest.mark.usefixtures("contributed")
def test_a_broken_command_takes_no_other_one_away(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = call("broken")
    assert (code, out) == (2, "")
    assert err.startswith("tierstore: error: command 'broken': contribution:missing cannot be load")
    assert call("greet", "Ada")[0] == 0


# Parts


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [("It is 58241.", True), ("58241", True), ("5824.", False), ("582410", False), ("", False)],
)
def test_the_fact_must_stand_in_the_answer_as_a_word(answer: str, is_right: bool) -> None:
    document = Document("text", "question", "", "58241")
    outcome = Outcome("model", "cpu", "float32", document, None, answer)  # type: ignore[arg-type]
    assert outcome.is_right(answer) is is_right


def test_shown_text_cannot_steer_a_terminal() -> None:
    assert visible("a\tb\n\x1b[31mred\x9b\x07\r") == "a\tb\n\ufffd[31mred\ufffd\ufffd\ufffd"


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    check_target(link, "json")
    assert target.read_text() == "old"
    json_file.write_json(link, {"new": None})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"new": None}
    assert files_under(tmp_path) == ["link.json", "target.json"]


def test_a_json_file_that_cannot_be_finished_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        json_file.write_json(target, {"new": None})
    assert target.read_text() == "old"
    assert files_under(tmp_path) == ["target.json"]
