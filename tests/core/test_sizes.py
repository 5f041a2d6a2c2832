"""Sizes and budgets as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.sizes import MOST, check_window, format_size, parse_budget, parse_size, parse_size_of


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 1),
        (1 << 40, 1 << 40),
        ("7", 7),
        ("7 B", 7),
        ("512KiB", 512 << 10),
        ("16MiB", 16 << 20),
        ("2 gib", 2 << 30),
        ("1TiB", 1 << 40),
        ("1.5 GB", 1_500_000_000),
        ("  0.5kb ", 500),
        ("3 MB", 3_000_000),
        ("2tb", 2_000_000_000_000),
    ],
)
def test_sizes_are_bytes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [("12.5%", 125), ("100%", 1000), (" 0.01 %", 1), ("33.33%", 334), ("2KiB", 2048), ("7%", 70)],
)
def test_sizes_may_be_shares_of_a_whole(size: str, expected: int) -> None:
    assert parse_size_of(size, 1000, "dram") == expected
    assert parse_size_of("55%", 100, "dram") == 55


@pytest.mark.parametrize("size", ["%", "0%", "-5%", "100.1%", "nan%", "1e1%", "1_0%", "a%", "5%%"])
def test_what_is_no_share_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="expected a share above 0% and up to 100%"):
        parse_size_of(size, 1000, "dram")


@pytest.mark.parametrize(
    "size", ["", "MiB", "1e9", "-1", "1,5MiB", "16 M", "16MiB/s", "٣MiBs", "0x10", "nan", "1..5KiB"]
)
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="expected a number and a unit") as error:
        parse_size(size, "dram")
    assert str(error.value).startswith(f"dram={size!r}: ")


@pytest.mark.parametrize("size", [1.5, None, True, b"1MiB", [1]])
def test_what_is_neither_int_nor_string_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"fast=.*expected bytes as an int or a string"):
        parse_size(size, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -4096, "0", "0.4", "0.0 MiB"])
def test_sizes_without_bytes_are_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match="expected more than zero bytes"):
        parse_size(size)


@pytest.mark.parametrize("size", [2**63, "8388608TiB", "9" * 400, "9" * 400 + "TiB"])
def test_sizes_beyond_64_bits_are_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match="expected less than 8 EiB"):
        parse_size(size)


def test_the_largest_size_is_taken() -> None:
    assert parse_size(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (16 << 20, "16.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (4096 << 40, "4096.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_readable(size: int, expected: str) -> None:
    assert format_size(size) == expected


@given(st.integers(1, 1 << 50))
def test_a_readable_size_is_nearly_the_size(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0.0625, 0.0625),
        (1.0, 1.0),
        ("6.25%", 0.0625),
        (" 100 % ", 1.0),
        ("0.5", 0.5),
        ("1.0", 1.0),
        (1, 1),
        ("1", 1),
        (2048, 2048),
        (" 2048 ", 2048),
        (str(MOST), MOST),
    ],
)
def test_budgets_are_shares_or_tokens(budget: float | str, expected: float) -> None:
    """One is a token and 1.0 is everything: the type decides."""
    parsed = parse_budget(budget)
    assert (type(parsed), parsed) == (type(expected), expected)


@pytest.mark.parametrize(
    "budget",
    [0, -1, 2**31, 10**400, "9" * 400, 0.0, 1.5, -0.1, "0%", "101%", "1.5", "0", "", "%", "half",
     "nan", float("nan"), float("inf"), True, None],
)  # fmt: skip
def test_what_is_no_budget_is_refused(budget: object) -> None:
    with pytest.raises(ConfigError, match=r"expected a share of the context in \(0, 1\]") as error:
        parse_budget(budget)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"budget={budget!r}: ")


@pytest.mark.parametrize("window", [0, 0.999, float("nan"), float("inf"), 10**400, True, "2"])
def test_what_is_no_window_is_refused(window: object) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 budget and at most"):
        check_window(window)  # type: ignore[arg-type]
    check_window(1)
    check_window(1e9)
