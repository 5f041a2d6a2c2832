"""Private directories that are gone when their process is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tierstore.ephemeral import PrivateDirectory, reap
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys
from tierstore.ephemeral import PrivateDirectory
directory = PrivateDirectory(sys.argv[1], keep=len(sys.argv) > 2)
(directory.path / "blocks").write_bytes(b"secret")
print(directory.path, flush=True)
"""
FORK = """
import os
child = os.fork()
if child == 0:
    directory.close()
    raise SystemExit
os.waitpid(child, 0)
assert directory.path.is_dir()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Private whatever the user's umask lets through."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_directory_and_lock_are_private(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path / "kv")
    assert mode(tmp_path / "kv") == mode(directory.path) == 0o700
    assert [mode(path) for path in directory.path.iterdir()] == [0o600]
    directory.close()


def test_closing_removes_everything_it_made(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path / "kv")
    (directory.path / "blocks").write_bytes(b"secret")
    directory.close()
    directory.close()
    assert names(tmp_path) == []


def test_closing_leaves_a_parent_that_was_there_and_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    PrivateDirectory(tmp_path / "kv").close()
    made = PrivateDirectory(tmp_path / "made")
    (tmp_path / "made" / "notes").touch()
    made.close()
    assert names(tmp_path) == ["kv", "made"]
    assert names(tmp_path / "made") == ["notes"]


def test_closing_after_the_parent_went_is_no_error(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    directory.close()


def test_two_directories_share_a_parent(tmp_path: Path) -> None:
    first, second = PrivateDirectory(tmp_path), PrivateDirectory(tmp_path)
    assert first.path != second.path
    first.close()
    assert second.path.is_dir()
    second.close()


def test_keeping_leaves_files_that_nobody_reaps(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path, keep=True)
    (directory.path / "blocks").write_bytes(b"wanted")
    directory.close()
    assert reap(tmp_path) == []
    PrivateDirectory(tmp_path).close()
    assert (directory.path / "blocks").read_bytes() == b"wanted"


def start(parent: Path, *arguments: str, then: str = "input()") -> subprocess.Popen[str]:
    """A process that holds a private directory until its standard input ends or says something."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD + then, str(parent), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def path_of(process: subprocess.Popen[str], parent: Path) -> Path:
    assert process.stdout is not None
    name = process.stdout.readline().strip().rpartition("/")[2]
    assert name, "the process ended early"
    return parent / name


def end(process: subprocess.Popen[str], killed: bool) -> int:
    if killed:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return process.returncode


def test_a_killed_process_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    process = start(tmp_path)
    left = path_of(process, tmp_path)
    assert reap(tmp_path) == [], "its process is alive"
    assert end(process, killed=True) == -signal.SIGKILL
    assert (left / "blocks").read_bytes() == b"secret"
    directory = PrivateDirectory(tmp_path)
    assert names(tmp_path) == [directory.path.name]
    directory.close()


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    """Also by an exception that nobody catches."""
    process = start(tmp_path / "kv", then="raise SystemExit(3)")
    path_of(process, tmp_path / "kv")
    assert end(process, killed=False) == 3
    assert names(tmp_path) == []


def test_a_process_that_ends_without_closing_keeps_what_it_should(tmp_path: Path) -> None:
    process = start(tmp_path, "keep", then="")
    left = path_of(process, tmp_path)
    assert end(process, killed=False) == 0
    assert reap(tmp_path) == []
    assert (left / "blocks").read_bytes() == b"secret"


def test_a_forked_child_takes_nothing_away(tmp_path: Path) -> None:
    process = start(tmp_path, then=FORK)
    path_of(process, tmp_path)
    assert end(process, killed=False) == 0
    assert names(tmp_path) == []


def test_only_private_directories_are_reaped(tmp_path: Path) -> None:
    """Alike in name, without a lock, with a lock of their own, or somewhere else behind a link."""
    (tmp_path / "tierstore-notes").mkdir()
    (tmp_path / "tierstore-file").touch()
    (tmp_path / "tierstore-build").mkdir()
    (tmp_path / "tierstore-build" / "lock").touch()
    elsewhere = PrivateDirectory(tmp_path / "elsewhere")
    lock = next(elsewhere.path.iterdir()).name
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / lock).touch()
    (tmp_path / "tierstore-link").symlink_to(tmp_path / "target")
    (tmp_path / "tierstore-linked").mkdir()
    (tmp_path / "tierstore-linked" / lock).symlink_to(tmp_path / "target" / lock)
    before = names(tmp_path)
    assert reap(tmp_path) == []
    assert names(tmp_path) == before
    assert names(tmp_path / "target") == [lock]
    elsewhere.close()


def test_the_lock_is_never_seen_without_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else starts at the very moment before a new directory's lock is taken."""
    import fcntl

    flock, seen = fcntl.flock, []

    def reap_first(fd: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB:
            seen.extend(reap(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", reap_first)
    directory = PrivateDirectory(tmp_path)
    assert seen == []
    assert directory.path.is_dir()
    directory.close()


def test_a_missing_grandparent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its parent directory .*missing' does not exist"):
        PrivateDirectory(tmp_path / "missing" / "kv")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "kv"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="expected a directory, found something else"):
        PrivateDirectory(place)
    assert names(tmp_path) == ["kv"]


def test_a_link_to_a_directory_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    directory = PrivateDirectory(tmp_path / "kv")
    assert names(tmp_path / "real") == [directory.path.name]
    directory.close()
    assert names(tmp_path) == ["kv", "real"]


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="the directory is not writable"):
        PrivateDirectory(tmp_path)


def test_a_directory_on_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ConfigError, match="No space left on device"):
        PrivateDirectory(tmp_path)
