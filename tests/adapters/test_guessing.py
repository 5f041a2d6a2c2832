"""previous-layer for attached models: what is guessed, when it is fetched, and what is left."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from dense_engine import DenseEngine
from tiny_models import (
    ARCHITECTURES,
    gemma3,
    left_padded,
    llama,
    mistral,
    phi3,
    qwen3,
    random_ids,
)
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.presets import PRESETS
from tierstore.adapters.transformers import attach, attach_engine, geometry_of
from tierstore.errors import UnsupportedModelError
from tierstore.indexers import ExactIndex, PartialColumnsIndex, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from tiny_models import LanguageModel
    from transformers import PreTrainedModel

    from tierstore.adapters.attention import Geometry
    from tierstore.indexers import IndexShape
    from tierstore.interfaces import Index

    Floats = npt.NDArray[np.float64]

LENGTHS = (21, 9, 14)
NEW = 6
ALTERNATING = ("sliding_attention", "full_attention") * 2


class Listening(DenseEngine):
    """Full attention, which keeps what it is asked and what it is told of the next layer.

    asked: (layer, query, guess of the next layer's query) of each call.
    """

    wants_next_query = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.asked: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []

    def attend(
        self, layer: int, query: torch.Tensor, *rest: torch.Tensor,
        valid: torch.Tensor | None = None, scale: float, next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self.asked.append((layer, query, next_query))
        return super().attend(layer, query, *rest, valid=valid, scale=scale)

    def decoded(self) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor | None]]]:
        """The calls of each decoding step."""
        layers = self.geometry.layers
        for start in range(layers, len(self.asked), layers):
            yield self.asked[start : start + layers]


def heard(model: LanguageModel, **inputs: torch.Tensor) -> Listening:
    """What an engine hears as `model` writes some tokens."""
    engine = Listening(geometry_of(model))
    with attach_engine(model, engine) as cache:
        model.generate(**inputs, **cache.kwargs, do_sample=False, max_new_tokens=NEW)
    return engine


def layers_of(model: PreTrainedModel) -> list[Any]:
    return list(model.get_decoder().layers)


def held_in(model: LanguageModel) -> list[int]:
    """Numbers of the layers that slide over no window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind == "full_attention"]


def adding_nothing(model: LanguageModel) -> LanguageModel:
    """The model with layers that leave the residual stream as it is, so that guesses are right."""
    for layer in layers_of(model):
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(projection.weight)
    return model


def gemma3_with_room(types: Sequence[str] = ALTERNATING) -> LanguageModel:
    """No text is as long as its window: all its layers are held, with two kinds of angles."""
    return gemma3(sliding_window=600, layer_types=list(types))


# What is guessed


@pytest.mark.parametrize("make_model", ARCHITECTURES)
def test_where_layers_add_nothing_each_guess_is_what_the_next_layer_asks(
    make_model: Callable[[], LanguageModel],
) -> None:
    """Through all that lies before attention; rows of a padded batch have their own positions."""
    model = adding_nothing(make_model())
    engine = heard(model, **left_padded(*LENGTHS))
    assert [guess for _, _, guess in engine.asked[: engine.geometry.layers]] == [None] * (
        engine.geometry.layers
    ), "a prompt is no step"
    steps = list(engine.decoded())
    assert len(steps) == NEW - 1
    guessing = [place for place, number in enumerate(held_in(model)) if number > 0]
    for step in steps:
        for (layer, _, guess), (_, query, _) in pairwise(step):
            assert (guess is not None) == (layer in guessing)
            assert guess is None or torch.equal(guess, query)
        assert step[-1][2] is None


@pytest.mark.parametrize(("kinds", "guessing"), [("sfsf", [1, 2]), ("ssfs", [2])])
def test_layers_that_rotate_differently_are_guessed_for_by_their_own_angles(
    kinds: str, guessing: list[int]
) -> None:
    """The first layer of a kind is not: nobody has its angles yet. s is sliding, f is full."""
    types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    engine = heard(adding_nothing(gemma3_with_room(types)), **left_padded(*LENGTHS))
    assert engine.geometry.layers == 4
    for step in engine.decoded():
        assert [layer for layer, _, guess in step if guess is not None] == guessing
        for layer in guessing:
            guess = step[layer][2]
            assert guess is not None
            assert torch.equal(guess, step[layer + 1][1])


def normed(vectors: Floats, weight: Floats, eps: float) -> Floats:
    scaled: Floats = vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + eps) * weight
    return scaled


def rotated(query: Floats, position: int, theta: float, share: float) -> Floats:
    """Query [Hq, d] turned to a position, its first dimensions only, in complex numbers."""
    half = int(share * query.shape[-1]) // 2
    angles = position * theta ** (-np.arange(half) / half)
    pairs = (query[:, :half] + 1j * query[:, half : 2 * half]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag, query[:, 2 * half :]], -1)


def by_hand(model: LanguageModel, layer: int, hidden: Floats, position: int) -> Floats:
    """Query [Hq, d] that a layer makes of normalised hidden states [width], in float64."""
    config, attention = model.config, layers_of(model)[layer].self_attn
    heads, dim = config.num_attention_heads, attention.head_dim
    projection = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
    query = projection.weight.detach().double().numpy()[: heads * dim] @ hidden
    query = query.reshape(heads, dim)
    if hasattr(attention, "q_norm"):
        weight = attention.q_norm.weight.detach().double().numpy()
        gain = weight + 1 if "Gemma" in type(model).__name__ else weight
        query = normed(query, gain, config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    return rotated(query, position, rope["rope_theta"], rope.get("partial_rotary_factor", 1.0))


@pytest.mark.parametrize(
    "make_model",
    [
        llama,
        partial(llama, rope_parameters={"rope_type": "default", "rope_theta": 300.0}),
        qwen3,
        phi3,
        partial(phi3, partial_rotary_factor=0.5),
        mistral,
        gemma3,
    ],
)
def test_a_guess_is_made_of_the_layer_s_normalised_input_by_the_next_layer_s_weights(
    make_model: Callable[[], LanguageModel],
) -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if "norm" in name:  # otherwise all alike, so that nobody could tell whose it is
            weight.data += 0.5 * torch.rand(weight.shape, generator=generator)
    held = held_in(model)
    entered: dict[int, list[torch.Tensor]] = {number: [] for number in held}
    for number in held:
        layers_of(model)[number].input_layernorm.register_forward_hook(
            lambda _, __, out, number=number: entered[number].append(out)
        )

    engine = heard(model, **left_padded(*LENGTHS))

    for step, calls in enumerate(engine.decoded()):
        for place, (layer, following) in enumerate(pairwise(held)):
            guess = calls[place][2]
            if layer == 0:
                assert guess is None
                continue
            assert guess is not None
            for row, length in enumerate(LENGTHS):
                hidden = entered[layer][step + 1][row, 0].double().numpy()
                expected = by_hand(model, following, hidden, length + step)
                np.testing.assert_allclose(guess[row, :, 0], expected, atol=1e-4)


def test_a_compiled_model_guesses_too() -> None:
    model = adding_nothing(llama())
    engine = Listening(geometry_of(model))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), attach_engine(model, engine) as cache:
        for tokens in (10, 1, 1):
            compiled(random_ids(1, tokens), **cache.kwargs)
    torch.compiler.reset()
    for step in engine.decoded():
        guess, query = step[1][2], step[2][1]
        assert guess is not None
        torch.testing.assert_close(guess, query)


# What becomes of it

GUESSING = replace(PRESETS["exact"], schedule="previous-layer")


@pytest.mark.parametrize("make_model", [*ARCHITECTURES, gemma3_with_room])
def test_where_everything_is_selected_outputs_are_those_of_sequential(
    make_model: Callable[[], LanguageModel], tmp_path: Path
) -> None:
    """Several sequences of different lengths, their blocks on disk."""
    model, logits = make_model(), []
    switch = getattr(model.config, "original_max_position_embeddings", None)
    inputs = left_padded(59, 30) if switch else left_padded(190, 90, 160)
    for schedule in ("sequential", "previous-layer"):
        with attach(
            model, preset="exact", budget=1.0, fast="2MiB", disk=tmp_path / schedule,
            schedule=schedule, micro_batch=1,
        ) as cache:  # fmt: skip
            found = model.generate(
                **inputs, **cache.kwargs, do_sample=False, max_new_tokens=5,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        logits.append(torch.stack(found.logits))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make_model", ARCHITECTURES)
@pytest.mark.parametrize(
    ("index", "block_tokens"),
    # The newest token is no part of a guess, so it must not weigh in what a guess selects.
    [(partial(ExactIndex, rule=Rule("mean_group", softmax=False)), 4), (PartialColumnsIndex, 1)],
    ids=["exact", "InfiniGen"],
)
def test_where_a_guess_is_right_the_selection_is_that_of_the_true_query(
    make_model: Callable[[], LanguageModel],
    index: Callable[[IndexShape], Index],
    block_tokens: int,
) -> None:
    model = adding_nothing(make_model())
    switch = getattr(model.config, "original_max_position_embeddings", None)
    inputs = left_padded(56, 50) if switch else left_padded(190, 140)
    preset = replace(PRESETS["exact"], index=index, block_tokens=block_tokens, budget=0.2, local=16)
    attended = []
    for schedule in ("sequential", "previous-layer"):
        engine = SparseAttention(
            geometry_of(model), preset=preset, fast="1MiB", dram="1MiB", schedule=schedule,
            record=True,
        )  # fmt: skip
        with attach_engine(model, engine) as cache:
            model.generate(**inputs, **cache.kwargs, do_sample=False, max_new_tokens=NEW)
            layers = range(engine.geometry.layers)
            attended.append([list(map(sorted, engine.attended(layer))) for layer in layers])
    assert attended[0] == attended[1]


@pytest.mark.parametrize("schedule", ["sequential", "previous-layer"])
def test_blocks_have_come_before_the_layer_that_asks_for_them_has_a_query(
    schedule: str, tmp_path: Path
) -> None:
    """Blocks that the last layer fetches itself, counted in each step."""
    model = llama()
    preset = replace(PRESETS["exact"], budget=0.1, schedule=schedule)
    engine = SparseAttention(
        geometry_of(model), preset=preset, fast="1MiB", disk=tmp_path / "kv", window=2.0
    )
    fetched: list[int] = []

    def count(*_: object) -> None:
        fetched.append(engine.store.metrics.fetched)

    with attach_engine(model, engine) as cache:
        last = layers_of(model)[-1]
        # Whatever is under way has ended when the store can be had.
        hooks = last.register_forward_pre_hook(count), last.self_attn.register_forward_hook(count)
        model.generate(random_ids(2, 300), **cache.kwargs, do_sample=False, max_new_tokens=20)
        for hook in hooks:
            hook.remove()
    own = np.diff(fetched)[2::2]
    assert len(own) == 19
    assert fetched[-1] > 0
    assert bool(own.any()) == (schedule == "sequential")


# What is left of it


def hooks_of(model: LanguageModel) -> int:
    """Hooks on all its parts."""
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


def test_nothing_is_hooked_for_an_engine_that_wants_no_guess() -> None:
    model = llama()
    with attach_engine(model, DenseEngine(geometry_of(model))):
        plain = hooks_of(model)
    quiet = Listening(geometry_of(model))
    quiet.wants_next_query = False
    for engine in (quiet, SparseAttention(geometry_of(model), dram="1MiB")):
        with attach_engine(model, engine):
            assert hooks_of(model) == plain
    with attach(model, dram="1MiB", schedule="previous-layer"):
        assert hooks_of(model) == plain + 3


@pytest.mark.parametrize("part", ["mlp", "self_attn.q_proj"])
def test_after_an_error_in_the_model_the_text_can_begin_anew_and_no_hook_stays(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query projection of layer 2 fails first as layer 1 guesses with it."""
    model = llama()
    ids = random_ids(1, 200)

    def fail(*_: object) -> None:
        raise MemoryError

    with torch.no_grad(), attach(model, preset=GUESSING, dram="2MiB") as cache:
        expected = model.generate(ids, **cache.kwargs, do_sample=False, max_new_tokens=NEW)
        cache.reset()
        model(ids, **cache.kwargs)
        monkeypatch.setattr(layers_of(model)[2].get_submodule(part), "forward", fail)
        with pytest.raises(MemoryError):
            model(ids[:, :1], **cache.kwargs)
        monkeypatch.undo()
        cache.reset()
        found = model.generate(ids, **cache.kwargs, do_sample=False, max_new_tokens=NEW)
        assert torch.equal(found, expected)
    with pytest.raises(KeyError), attach(model, preset=GUESSING, dram="2MiB"):
        raise KeyError
    assert hooks_of(model) == 0


def test_attention_that_does_not_ask_cannot_be_guessed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama()
    with torch.no_grad(), attach(model, dram="1MiB", schedule="previous-layer") as cache:
        model(random_ids(1, 20), **cache.kwargs)
        silent = layers_of(model)[2].self_attn
        monkeypatch.setattr(silent, "forward", lambda hidden_states, **_: (hidden_states, None))
        with pytest.raises(UnsupportedModelError, match="LlamaAttention does not attend when it"):
            model(random_ids(1, 1), **cache.kwargs)


def test_a_model_whose_attention_is_elsewhere_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GPTNeoXConfig(vocab_size=64, intermediate_size=32, **shape)  # type: ignore[arg-type]
    model: Any = GPTNeoXForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="has no self_attn in each of its decoder's 2"):
        attach(model, dram="1MiB", disk=tmp_path / "kv", schedule="previous-layer")
    assert hooks_of(model) == 0
    assert not any(tmp_path.rglob("*blocks*"))
    attach(model, dram="1MiB").close()
