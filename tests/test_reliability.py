"""The table of fault cases in docs/reliability.md is what the tests are."""

from fault_cases import ROOT, cases_to_tests, rows


def test_every_fault_case_has_a_test() -> None:
    assert [case for case, tests in cases_to_tests().items() if not tests] == []


def test_the_table_is_up_to_date() -> None:
    """``python tests/fault_cases.py`` prints the rows."""
    document = (ROOT.parent / "docs" / "reliability.md").read_text().splitlines()
    assert [row for row in rows() if row not in document] == []
