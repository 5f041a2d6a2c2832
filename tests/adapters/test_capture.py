"""What is captured of a model, against what transformers itself says of the same text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny_models import gemma3, llama, own_cache, random_ids

from tierstore.adapters.capture import capture
from tierstore.adapters.cli import capturing, main
from tierstore.adapters.models import LoadedModel
from tierstore.errors import ConfigError, TraceError
from tierstore.kernels.element import to_tensor
from tierstore.traces.capture import KIND, Capture
from tierstore.traces.file import read_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LanguageModel

STEPS, PROMPT = 5, 90


def llama_of(dtype: torch.dtype) -> LanguageModel:
    module: torch.nn.Module = llama()
    return cast("LanguageModel", module.to(dtype))


def ids() -> list[int]:
    found: list[int] = random_ids(1, PROMPT + STEPS)[0].tolist()
    return found


@torch.no_grad()
def test_keys_values_and_queries_are_those_of_the_model() -> None:
    model = llama()
    found = capture(model, ids(), STEPS, window=7, with_hidden=True)
    cache = own_cache(model)
    model.set_attn_implementation("eager")
    own = model(
        input_ids=torch.tensor([ids()]),
        **cache,
        output_attentions=True,
        output_hidden_states=True,
    )
    (held,) = cache.values()
    for layer in range(3):
        keys, values = (getattr(held.layers[layer], name)[0] for name in ("keys", "values"))
        torch.testing.assert_close(to_tensor(found.keys[layer]), keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(to_tensor(found.values[layer]), values, rtol=1e-4, atol=1e-4)
        _check_weights(own.attentions[layer][0], found, layer)
        hidden = own.hidden_states[layer][0, PROMPT:]
        assert found.hidden is not None
        torch.testing.assert_close(to_tensor(found.hidden[layer]), hidden, rtol=1e-3, atol=1e-3)


def _check_weights(weights: torch.Tensor, found: Capture, layer: int) -> None:
    """Queries give the attention weights [Hq, n, n] that the model had, in float64."""
    keys = found.keys[layer].astype(np.float64)
    kinds = {PROMPT: found.queries[layer], PROMPT - 7: found.last_queries[layer]}
    for first, queries in kinds.items():
        for head in range(4):
            for i, query in enumerate(queries[head // 2, head % 2].astype(np.float64)):
                logits = keys[head // 2, : first + i + 1] @ query * found.scale
                own = np.exp(logits - logits.max())
                expected = weights[head, first + i, : first + i + 1].numpy()
                np.testing.assert_allclose(own / own.sum(), expected, rtol=1e-3, atol=1e-5)


def test_a_model_with_sliding_layers_gives_its_full_ones() -> None:
    found = capture(gemma3(), ids(), STEPS, with_hidden=True)
    assert len(found.keys) == 2
    assert found.hidden is not None
    assert found.hidden.shape == (2, STEPS, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_capture_survives_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama_of(dtype)
    found = capture(model, ids(), STEPS, document="text.txt")
    found.save(tmp_path / "a.npz")
    again = Capture.load(tmp_path / "a.npz")
    assert (again.prompt_tokens, again.steps, again.dtype) == (PROMPT, STEPS, dtype)
    assert again.facts == found.facts
    assert again.scale == found.scale
    assert again.hidden is None
    for name in ("keys", "values", "queries", "last_queries"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


def test_numpy_alone_reads_the_file(tmp_path: Path) -> None:
    found = capture(llama_of(torch.bfloat16), ids(), STEPS)
    found.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        facts = json.loads(archive["header"].tobytes())["facts"]
        keys = (archive["keys"].astype(np.uint32) << 16).view(np.float32)
    assert facts["dtype"] == "bfloat16"
    np.testing.assert_array_equal(keys, to_tensor(found.keys).float().numpy())


@pytest.mark.parametrize(
    ("name", "wrong"), [("layers", 4), ("steps", 0), ("dtype", "float16"), ("scale", None)]
)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path, name: str, wrong: object
) -> None:
    path = tmp_path / "a.npz"
    capture(llama(), ids(), STEPS).save(path)
    facts, arrays = read_trace(path, KIND)
    write_trace(path, KIND, {**facts, name: wrong}, arrays)
    with pytest.raises(TraceError, match=r"a\.npz: expected"):
        Capture.load(path)


def test_what_is_too_much_is_refused_before_anything_runs() -> None:
    model = llama()
    bytes_needed = 3 * (95 * 2 * 32 + (5 + 64) * 64) * 4
    capture(model, ids(), STEPS, limit=bytes_needed)
    with pytest.raises(ConfigError, match="take fewer tokens, or raise the limit"):
        capture(model, ids(), STEPS, limit=bytes_needed - 1)
    for steps, window in ((0, 1), (94, 1), (5, 0)):
        with pytest.raises(ConfigError, match="expected at least 1"):
            capture(model, ids(), steps, window=window)


def test_the_command_writes_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = cast("LanguageModel", llama(vocab_size=256))
    tiny = LoadedModel(model, byte_tokenizer(), "tiny")
    monkeypatch.setattr(capturing, "load_model", lambda *_: tiny)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 10)
    short = ["--document", "text.txt", "--tokens", "200", "--steps", "6", "--dtype", "float32"]
    assert main(["capture", "a.npz", *short]) == 0
    assert "a.npz: 200 tokens and 6 steps of 3 layers, " in capsys.readouterr().out
    facts = Capture.load(tmp_path / "a.npz").facts
    assert (facts["model"], facts["document"]) == ("tiny", "text.txt")
    for options, message in (
        (["a.npz", *short, "--steps", "0"], "steps=0: expected a whole number"),
        (["a.npz", *short, "--dtype", "int8"], "dtype='int8'"),
        (["a.npz", *short, "--limit", "1KiB"], "raise the limit"),
        (["a.npz", *short, "--limit", "much"], "limit='much'"),
        (["missing/a.npz", *short], "file='missing/a.npz'"),
    ):
        assert main(["capture", *options]) == 2
        assert message in capsys.readouterr().err
