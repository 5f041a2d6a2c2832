"""What the documents show works: Python blocks run, commands exist.

A Python block is left out by a comment on the line above it: `<!-- not run: reason -->`.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

BLOCK = re.compile(
    r"(?P<opt_out>^[ ]*<!--[ ]not[ ]run:[ ]\S.*-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line of code in the document."""

    language: str
    code: str
    line: int
    opted_out: bool


def blocks(text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(match["language"], dedent(match["code"]), line, bool(match["opt_out"]))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the sh and console blocks, without assignments before it."""
    for block in blocks(text):
        if block.language not in {"sh", "console"}:
            continue
        lines = block.code.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for part in (part for line in lines for part in re.split(r"&&|\|\||[;|]", line)):
            words = shlex.split(part, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words


def commands_in(document: Path, program: str) -> list[list[str]]:
    return [words for words in commands(document.read_text()) if words[0] == program]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@each_document
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one document share one module and run in one empty folder, in order."""
    runnable = [
        block
        for block in blocks(document.read_text())
        if block.language == "python" and not block.opted_out
    ]
    module = ModuleType(f"document_{document.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    for block in runnable:
        # Blank lines in front make a traceback point into the document.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(document), "exec"), module.__dict__)


@each_document
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for words in commands_in(document, "make")
        for word in words[1:]
        if "=" not in word and not word.startswith("-")
    }
    assert named <= targets


@each_document
def test_commands_and_their_options_exist(document: Path) -> None:
    if find_spec("tierstore.adapters.cli") is None:
        pytest.skip("there is no command line yet")
    for words in commands_in(document, "tierstore"):
        command = takewhile(lambda word: not word.startswith("-"), words[1:])
        program = str(Path(sys.executable).parent / "tierstore")
        answer = subprocess.run(
            [program, *command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert answer.returncode == 0, f"{shlex.join(words)}: {answer.stderr}"
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", answer.stdout)), shlex.join(words)


def test_blocks_and_commands_are_found() -> None:
    text = dedent(
        """\
        ```python
        first = 1
        ```
        <!-- not run: needs a GPU -->
        ```python
        second = 2
        ```
        1. In a list:

           ```python
           third = 3
           ```
        ```sh
        PYTHON=python3.12 make demo  # a comment
        tierstore generate \\
            --budget 6.25% && make test
        ```
        ```console
        $ make check
        make: output
        ```
        """
    )
    python = [block for block in blocks(text) if block.language == "python"]
    assert [(block.code, block.line, block.opted_out) for block in python] == [
        ("first = 1\n", 2, False),
        ("second = 2\n", 6, True),
        ("third = 3\n", 11, False),
    ]
    assert list(commands(text)) == [
        ["make", "demo"],
        ["tierstore", "generate", "--budget", "6.25%"],
        ["make", "test"],
        ["make", "check"],
    ]
