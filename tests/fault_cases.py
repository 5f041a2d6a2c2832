"""Which test shows which fault case: a test's docstring begins with the numbers of its cases.

``python tests/fault_cases.py`` prints the rows of the table in docs/reliability.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent
CASES = [
    f"{family}{number}"
    for family, count in {"A": 18, "B": 12, "C": 19, "D": 14, "E": 14}.items()
    for number in range(1, count + 1)
]
_NUMBERS = re.compile(r"[A-E]\d+(?:, [A-E]\d+)*(?=[.:,])")


def cases_to_tests() -> dict[str, list[str]]:
    """Names of tests, with their file, by fault case."""
    found: dict[str, list[str]] = {case: [] for case in CASES}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                match = _NUMBERS.match(ast.get_docstring(node) or "")
                is_test = node.name.startswith(("test_", "Test"))
                for case in match[0].split(", ") if match and is_test else ():
                    found[case].append(f"{path.relative_to(ROOT)}: {node.name}")
    return found


def rows() -> list[str]:
    """Rows of the table: case, how many tests, and one of them."""
    return [f"| {case} | {len(tests)} | `{tests[0]}` |" for case, tests in cases_to_tests().items()]


if __name__ == "__main__":
    print("\n".join(rows()))
