"""The sizes of models that a plan needs, and some models by name."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError


@dataclass(frozen=True)
class ModelSize:
    """A decoder of the Llama family in 16-bit numbers.

    Attributes
    ----------
    hidden, intermediate: widths of the residual stream and of the gated feed-forward part.
    is_tied: whether input and output embedding are one matrix.
    source: where the numbers are from.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    source: str

    ELEMENT = 2
    """Bytes of a number."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.ELEMENT

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections, and the three matrices of the feed-forward part."""
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Weights of the output embedding."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All weights, norms left out."""
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.ELEMENT


MODELS = {
    model.name: model
    for model in (
        ModelSize(
            "llama3-8b", 32, 32, 8, 128, 4096, 14336, 128256, False,
            "config.json of Llama-3-8B and of its 1048K-token version",
        ),
        ModelSize(
            "qwen3-8b", 36, 32, 8, 128, 4096, 12288, 151936, False, "config.json of Qwen3-8B"
        ),
        ModelSize(
            "qwen3-14b", 40, 40, 8, 128, 5120, 17408, 151936, False, "config.json of Qwen3-14B"
        ),
        ModelSize(
            "phi4-mini", 32, 24, 8, 128, 3072, 8192, 200064, True,
            "config.json of Phi-4-mini-instruct",
        ),
        ModelSize(
            "smollm2", 30, 9, 3, 64, 576, 1536, 49152, True,
            "config.json of SmolLM2-135M-Instruct",
        ),
    )
}  # fmt: skip


def model_named(name: str) -> ModelSize:
    """The model called so; ConfigError lists the names."""
    if name not in MODELS:
        raise ConfigError(f"model={name!r}: expected one of {', '.join(MODELS)}")
    return MODELS[name]
