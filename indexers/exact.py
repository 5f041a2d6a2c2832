"""Every key is its own representative: the oracle that other indexes are measured against."""

from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex


class ExactIndex(ScoringIndex):
    """Ranks blocks by their true attention mass, summed over tokens and query heads."""

    def __init__(self, shape: IndexShape, *, rule: Rule | None = None) -> None:
        super().__init__(shape, page_tokens=1, rule=rule)

    def represent(self, new: NewTokens) -> Representatives:
        return Representatives({"vectors": new.keys})
