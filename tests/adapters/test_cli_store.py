"""`tierstore store`: what it prints about stores on disk, what it changes, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tierstore.adapters.cli import main
from tierstore.codecs import ShuffleZstdCodec
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[..., tuple[int, str, str]]

TIERSTORE = str(Path(sys.executable).parent / "tierstore")
FIRST = Identity(model="first", tenant="a", block=(2, 8))
SECOND = Identity(model="second")
VALUES = {bytes([i]): b"%d" % i * 1000 for i in range(20)}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Call `main` here: exit code, standard output and error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["store", *map(str, arguments)])
        return code, *capsys.readouterr()

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of two namespaces, the second with a codec."""
    root = tmp_path / "kv"
    with KeyedStore(root, FIRST, disk="2MiB", segment="128KiB") as store:
        store.put_many([b"before", b"in another file"], [b"cleared", bytes(9000)])
        store.clear()
        assert store.put_many(list(VALUES), list(VALUES.values())).all()
    with KeyedStore(root, SECOND, disk="2MiB", segment="128KiB", codec=ShuffleZstdCodec()) as store:
        assert store.put(b"\xab\xcd", bytes(1000))
    return root


def folder(root: Path, model: str) -> Path:
    (found,) = root.glob(f"{model}-*")
    return found


def damage(root: Path) -> None:
    """Flip bits in every extent of the first namespace that begins with the value of key 5."""
    for path in (folder(root, "first") / "segments").iterdir():
        content = path.read_bytes()
        path.write_bytes(content.replace(VALUES[b"\x05"], b"6" + VALUES[b"\x05"][1:]))


# Looking


def test_stat_shows_each_namespace(root: Path, call: Call) -> None:
    code, out, error = call("stat", root)
    assert (code, error) == (0, "")
    first, second = out[: out.index(f"{root}/second-")], out[out.index(f"{root}/second-") :]
    assert "identity: model='first', block=(2, 8), tenant='a', codec='raw'" in first
    assert "format version 1, epoch 2" in first
    assert "20 records of 29.3 KiB" in first
    assert "codec='shuffle+zstd'" in second
    assert "1 records of" in second
    assert call("stat", folder(root, "first"))[1] == first


def test_stat_has_a_form_for_programs(root: Path, call: Call) -> None:
    code, out, _ = call("stat", "--json", root)
    assert code == 0
    record = json.loads(out)
    assert record["schema"] == 1
    first, second = record["namespaces"]
    assert first["identity"]["model"] == "first"
    assert first["identity"]["block"] == [2, 8]
    assert (first["epoch"], first["records"], first["format_version"]) == (2, 20, 1)
    assert first["stored_bytes"] == sum(map(len, VALUES.values()))
    (size,) = first["size_classes"]
    assert (size["extent_bytes"], size["records"], size["evictable"]) == (4096, 20, 20)
    assert size["occupancy"] == 20 / size["extents"]
    assert second["stored_bytes"] < 1000


def test_ls_prints_keys(root: Path, call: Call) -> None:
    code, out, error = call("ls", root)
    assert (code, error) == (0, "")
    assert sorted(out.split()) == sorted([*(key.hex() for key in VALUES), "abcd"])
    assert call("ls", root, "--prefix", "ab")[1] == "abcd\n"
    assert len(call("ls", root, "--limit", "3")[1].split()) == 3
    assert call("ls", root, "--prefix", "ffff")[:2] == (0, "")


def test_ls_tells_sizes_sequence_and_codec(root: Path, call: Call) -> None:
    _, out, _ = call("ls", root, "--long", "--prefix", "abcd")
    key, value_bytes, stored_bytes, sequence, codec = out.split()
    assert (key, value_bytes, codec) == ("abcd", "1000", "shuffle+zstd")
    assert int(stored_bytes) < 1000
    assert int(sequence) > 0


def test_verify_reads_every_payload(root: Path, call: Call) -> None:
    code, out, error = call("verify", root)
    assert (code, error) == (0, "")
    assert "20 records, 29.3 KiB in " in out
    assert "MB/s), 0 damaged" in out
    damage(root)
    code, out, _ = call("verify", root)
    assert code == 1
    assert "1 damaged" in out
    assert "1000 bytes do not match their checksum" in out


# Checking and repairing


def test_a_good_store_checks_as_such(root: Path, call: Call) -> None:
    code, out, error = call("check", root)
    assert (code, error) == (0, "")
    assert out.count("all is well") == 2


def test_a_damaged_store_is_shown_then_repaired_then_good(root: Path, call: Call) -> None:
    damage(root)
    (folder(root, "first") / "segments").chmod(0o755)
    code, out, _ = call("check", root)
    assert code == 1
    assert f"{folder(root, 'first')}: 2 findings" in out
    assert "payload" in out
    assert "has mode 0755, expected 0700" in out
    assert "tierstore store check --fix" in out
    assert f"{folder(root, 'second')}: 1 records" in out
    code, out, _ = call("check", "--fix", root)
    assert code == 1
    assert out.count(" yes ") == 2
    assert call("check", root)[0] == 0
    with KeyedStore(root, FIRST, disk="2MiB") as store:
        assert store.get(b"\x05") is None
        assert store.get(b"\x06") == VALUES[b"\x06"]


def test_foreign_files_are_named_but_no_failure(root: Path, call: Call) -> None:
    (folder(root, "first") / "notes\x1b[31m.txt").touch()
    (folder(root, "first") / os.fsdecode(b"\xff")).touch()
    for options in ((), ("--fix",)):
        code, out, _ = call("check", *options, root)
        assert code == 0
        assert "2 findings" in out
        assert "notes\N{REPLACEMENT CHARACTER}[31m.txt" in out
    assert len(list(folder(root, "first").iterdir())) == 4 + 2


def test_a_namespace_without_identity_does_not_hide_the_others(root: Path, call: Call) -> None:
    (folder(root, "first") / "IDENTITY").write_bytes(b"garbage\n")
    code, out, _ = call("check", "--fix", root)
    assert code == 1
    assert "is damaged or missing" in " ".join(out.split())
    assert "all is well" in out
    assert call("stat", root)[0] == 2


# Removing


def test_gc_removes_what_was_cleared(root: Path, call: Call) -> None:
    def has_secret() -> bool:
        segments = (folder(root, "first") / "segments").iterdir()
        return any(b"cleared" in path.read_bytes() for path in segments)

    assert has_secret()
    code, out, _ = call("gc", root)
    assert code == 0
    assert "segment files (128.0 KiB) made empty" in out
    assert not has_secret()
    assert call("verify", root)[0] == 0


def test_gc_removes_a_namespace_only_when_told_twice(root: Path, call: Call) -> None:
    name = folder(root, "second").name
    code, _, error = call("gc", root, "--namespace", name)
    assert code == 2
    assert "add --yes" in error
    assert folder(root, "second").exists()
    code, out, _ = call("gc", root, "--namespace", name, "--yes")
    assert code == 0
    assert f"{root / name}: removed" in out
    assert [path.name for path in root.iterdir()] == [folder(root, "first").name]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "{root}", "--prefix", "xyz"), "expected hexadecimal digits"),
        (("ls", "{root}", "--limit", "0"), "expected at least 1"),
        (("gc", "{root}", "--yes"), "it goes with --namespace"),
        (("gc", "{root}", "--namespace", "nobody", "--yes"), "expected one of 'first-"),
        (("stat", "{root}/nowhere"), "cannot be read (No such file or directory)"),
        (("check", "{root}/.."), "holds no store"),
        (("mend", "{root}"), "invalid choice: 'mend'"),
        ((), "the following arguments are required: action"),
        (("check",), "the following arguments are required: PATH"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    root: Path, call: Call, arguments: tuple[str, ...], message: str
) -> None:
    code, out, error = call(*(argument.format(root=root) for argument in arguments))
    assert (code, out) == (2, "")
    assert error.startswith("tierstore: error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("action", ["stat", "ls", "check", "verify", "gc"])
def test_a_store_that_is_open_is_left_alone(root: Path, call: Call, action: str) -> None:
    with KeyedStore(root, FIRST, disk="2MiB"):
        code, _, error = call(action, folder(root, "first"))
    assert code == 2
    assert f"is open in process {os.getpid()}: close it there" in error
    assert error.count("\n") == 1


# As a process


def test_the_exit_code_reaches_the_shell_and_a_terminal_shows_a_bar(root: Path) -> None:
    damage(root)
    master, slave = pty.openpty()
    done = subprocess.run(
        [TIERSTORE, "store", "check", str(root)],
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 1
    assert "payload" in done.stdout
    assert "checking first-" in shown
