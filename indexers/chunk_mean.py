"""Each page is represented by the mean of its keys (as ShadowKV's landmarks are)."""

from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import NewTokens, Representatives, ScoringIndex


class ChunkMeanIndex(ScoringIndex):
    """One mean key per page. ShadowKV takes the largest mass over heads, not the sum."""

    rule = Rule("max")

    def represent(self, new: NewTokens) -> Representatives:
        return Representatives({"vectors": new.page_means(self.page_tokens)})
