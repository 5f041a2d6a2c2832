"""The kernel benchmark at tiny sizes: every case can be made, and what is said of some."""

from __future__ import annotations

import numpy as np
import pytest
from bench_schema import as_json

from tierstore.benchmarks.kernel_cases import Sizes
from tierstore.benchmarks.kernels import CASES, measure, run
from tierstore.errors import ConfigError

SIZES = {"large": Sizes(2, 4, 128, 512, 64)}


def test_a_kernel_is_compared_with_torch_and_with_its_bound() -> None:
    said: list[str] = []
    chosen = {name: CASES[name] for name in ("dot_logits", "select_blocks", "copy_rows")}

    findings = measure(said.append, repeat=2, parts=["large"], sizes=SIZES, cases=chosen)

    data = as_json(findings)
    assert set(data["measures"]) == {f"{name}, large" for name in chosen}
    for measured in data["measures"].values():
        values = measured["values"]
        assert set(values) == {"ours", "torch", "attainable", "moved", "work"}
        expected = np.maximum(values["moved"], values["work"])
        np.testing.assert_array_equal(values["attainable"], expected)
    targets = [ratio["at_least"] for ratio in data["ratios"]]
    assert targets == [0.6, 4.0, 0.6, 0.6]
    assert len(said) == 3
    assert data["details"]["work"]["copy_rows, large"] == "copies anywhere"


@pytest.mark.parametrize("parts", ["", "large,small"])
def test_unknown_parts_are_refused(parts: str) -> None:
    with pytest.raises(ConfigError, match="expected some of large, demo, append, build"):
        run(lambda _: None, parts=parts)
