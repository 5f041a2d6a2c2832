"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.whole_file import check_target, replacing

LONGEST = "n" * 255


def test_the_longest_name_that_a_file_can_have_will_do(tmp_path: Path) -> None:
    target = tmp_path / LONGEST
    check_target(target, "json")
    assert list(tmp_path.iterdir()) == []
    with replacing(target) as unfinished:
        unfinished.write_text("new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_goes_wrong_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as unfinished:
            unfinished.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_where_no_file_can_be_is_said_before_one_is_written(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for target, reason in (
        (tmp_path / (LONGEST + "n"), "File name too long"),
        (tmp_path / "n" / "a", "No such file or directory"),
        (tmp_path / "file" / "a", "Not a directory"),
        (loop, "Too many levels of symbolic links"),
        (tmp_path, "exists and is no file"),
        (Path("/dev/null"), "exists and is no file"),
    ):
        with pytest.raises(ConfigError, match=f"^plan=.*{reason}"):
            check_target(target, "plan")
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    with replacing(link) as unfinished:
        unfinished.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
