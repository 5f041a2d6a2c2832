"""A finished run of ``tierstore generate``, with everything that is reported about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.adapters.documents import Document
    from tierstore.adapters.generate import Comparison, Generation, Result

SCHEMA = 1
"""Version of the form of `Outcome.to_dict`: another one where a field changed or went."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was asked of which model, and what came of it.

    Attributes
    ----------
    device, dtype: where and in which numbers the model computed.
    answer, full_answer: text of the tiered run and of full attention, up to the end of the text.
    """

    model: str
    device: str
    dtype: str
    document: Document
    result: Result
    answer: str
    full_answer: str | None = None

    def is_right(self, answer: str) -> bool:
        """Whether the planted fact stands in `answer` as a word of its own."""
        return re.search(rf"\b{re.escape(self.document.answer)}\b", answer) is not None

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; null where there is no number.

        - ``schema``: version of this form; ``tierstore``: version of the package
        - ``model``: ``name``, ``device``, ``dtype``
        - ``question``: as the model was asked
        - ``generation``: ``answer``, text up to its end; ``tokens``, ids of all new tokens;
          ``prompt_tokens``; ``prefill_seconds``, ``prefill_tokens_per_second``;
          ``first_step_seconds``; ``decode_tokens_per_second`` and ``median_step_seconds``, both
          without the first step; ``step_seconds``, of each token after the first
        - ``loaded_tokens``: of the prompt, from prefixes; the others were computed
        - ``tiers``: what `tierstore.adapters.attention.Report.to_dict` returns
        - ``fact``: null unless one was planted and asked for; ``expected``, ``found`` and, null
          without a comparison, ``full_found``
        - ``comparison``: null without one; ``full``, as ``generation``; ``full_kv_bytes``;
          ``same_tokens``; ``first_difference``, null or the place of a new token, from 0;
          ``kl``, nats per token after the first, and ``mean_kl``; ``prefill_speedup``,
          ``decode_speedup`` and ``median_step_speedup``, above 1 where tiers are faster
        """
        result = self.result
        return {
            "schema": SCHEMA,
            "tierstore": metadata.version("tierstore"),
            "model": {"name": self.model, "device": self.device, "dtype": self.dtype},
            "question": self.document.question,
            "generation": _generation(result.generation, self.answer),
            "loaded_tokens": result.loaded_tokens,
            "tiers": result.report.to_dict(),
            "fact": self._fact(),
            "comparison": self._comparison(result.comparison),
        }

    def _fact(self) -> dict[str, object] | None:
        if not self.document.answer:
            return None
        return {
            "expected": self.document.answer,
            "found": self.is_right(self.answer),
            "full_found": None if self.full_answer is None else self.is_right(self.full_answer),
        }

    def _comparison(self, comparison: Comparison | None) -> dict[str, object] | None:
        if comparison is None or self.full_answer is None:
            return None
        ours, full = self.result.generation, comparison.full
        return {
            "full": _generation(full, self.full_answer),
            "full_kv_bytes": comparison.full_kv_bytes,
            "same_tokens": comparison.first_difference is None,
            "first_difference": comparison.first_difference,
            "mean_kl": comparison.mean_kl,
            "kl": comparison.kl,
            "prefill_speedup": ratio(ours.prefill_rate, full.prefill_rate),
            "decode_speedup": ratio(ours.decode_rate, full.decode_rate),
            "median_step_speedup": ratio(full.median_step_seconds, ours.median_step_seconds),
        }


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None where a part of it is missing."""
    return None if numerator is None or denominator is None else numerator / denominator


def _generation(generation: Generation, answer: str) -> dict[str, object]:
    return {
        "answer": answer,
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_tokens,
        "prefill_seconds": generation.prefill_seconds,
        "prefill_tokens_per_second": generation.prefill_rate,
        "first_step_seconds": generation.first_step_seconds,
        "decode_tokens_per_second": generation.decode_rate,
        "median_step_seconds": generation.median_step_seconds,
        "step_seconds": generation.step_seconds,
    }
