"""Prompts that begin like earlier ones: the same tokens as without, whoever computed them when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dense_engine import DenseEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import gemma3, left_padded, llama, own_cache, phi3_with_longrope, random_ids

from tierstore.adapters.attention.prefixes import Prefixes
from tierstore.adapters.presets import Preset
from tierstore.adapters.transformers import TierCache, attach, attach_engine, geometry_of
from tierstore.errors import ConfigError, UnsupportedModelError
from tierstore.identity import Identity
from tierstore.indexers import ExactIndex, HierarchicalIndex
from tierstore.keyed import KeyedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiny_models import LanguageModel

SINKS, PIECE = 4, 64
ALL = {"budget": 1.0, "dram": "16MiB"}
"""Every token is attended, so that tokens must be those of full attention."""
SPARSE = {"preset": "exact", "budget": 12, "dram": "16MiB"}


def kept(common: int, prompt: int) -> int:
    """Tokens that should be loaded of a prompt that has so many in common with an earlier one."""
    whole = (min(common, prompt - 2) - SINKS) // PIECE
    return SINKS + whole * PIECE if whole > 0 else 0


def text(tokens: int, seed: int = 1) -> list[int]:
    ids: list[int] = random_ids(1, tokens, seed)[0].tolist()
    return ids


def prefixes(place: Path | KeyedStore, **options: object) -> Prefixes:
    return Prefixes(place, disk="16MiB", **options)  # type: ignore[arg-type]


def greedy(model: LanguageModel, cache: object, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    found = model.generate(ids, **cache, max_new_tokens=tokens, do_sample=False)  # type: ignore[arg-type]
    assert isinstance(found, torch.Tensor)
    new: list[int] = found[0, len(prompt) :].tolist()
    return new


def answer(
    model: LanguageModel,
    prompt: Sequence[int],
    place: Prefixes | Path | KeyedStore | None,
    tokens: int = 8,
    **options: object,
) -> tuple[list[int], int]:
    """New tokens, and how many of the prompt were loaded."""
    with attach(model, **{**ALL, **options}, prefixes=place) as cache:  # type: ignore[arg-type]
        new = greedy(model, cache.kwargs, prompt, tokens)
        return new, sum(cache.loaded_tokens)


@pytest.fixture
def model() -> LanguageModel:
    return llama()


@pytest.fixture
def place(tmp_path: Path) -> Prefixes:
    return prefixes(tmp_path / "prefixes")


@given(st.integers(2, 300), st.integers(0, 300), st.integers(1, 60))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_common_beginning_gives_the_tokens_of_full_attention(
    tmp_path_factory: pytest.TempPathFactory, first: int, common: int, more: int
) -> None:
    model, place = llama(), prefixes(tmp_path_factory.mktemp("place") / "prefixes")
    one = text(first)
    two = [*one[:common], *text(more, seed=2)]
    answer(model, one, place, 1)

    new, loaded = answer(model, two, place)

    assert new == greedy(model, own_cache(model), two, 8)
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    assert loaded == kept(min(len(one), len(two)) if same is None else same, len(two))


@pytest.mark.parametrize(
    ("preset", "tiers"),
    [
        ("kvdrive", {}),
        ("kvdrive", {"disk": True}),
        ("best", {}),
        ("chunk-mean", {"fast": "192KiB"}),
        ("full", {"disk": True}),
    ],
)
def test_sparse_steps_are_those_after_the_same_passes(
    model: LanguageModel, place: Prefixes, tmp_path: Path, preset: str, tiers: dict[str, object]
) -> None:
    """Without reuse: the earlier prompt is computed, cut to what they have in common, and goes on.

    The index then is the earlier prompt's, cut, in both. Presets that attend to what is resident in
    a fast tier have no part in this: what is resident depends on the way there.
    """
    one, rest = text(200), text(40, seed=2)
    if "disk" in tiers:
        tiers = {"disk": tmp_path / "disk"}
    options = {"preset": preset, "budget": 0.2, "dram": "16MiB", **tiers}
    cut = kept(150, 190)
    with torch.no_grad(), attach(model, **options) as cache:  # type: ignore[arg-type]
        model(torch.tensor([one]), **cache.kwargs)
        cache.crop(cut - 200)
        expected = after(model, cache, rest)
    with torch.no_grad(), attach(model, prefixes=place, **options) as cache:  # type: ignore[arg-type]
        model(torch.tensor([one]), **cache.kwargs)

    with torch.no_grad(), attach(model, prefixes=place, **options) as cache:  # type: ignore[arg-type]
        found = after(model, cache, [*one[:cut], *rest])

    assert cache.loaded_tokens == [cut]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def after(model: LanguageModel, cache: TierCache, prompt: Sequence[int]) -> torch.Tensor:
    """Logits after a prompt and after each of some tokens that are decoded behind it."""
    passes = [prompt, *([token] for token in text(6, seed=3))]
    return torch.stack([model(torch.tensor([one]), **cache.kwargs).logits[0, -1] for one in passes])


_OTHER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_prefixes import answer, prefixes, text
from tiny_models import llama
torch.set_num_threads(1)
print(answer(llama(), text(230), prefixes(Path(sys.argv[2])), preset="kvdrive", budget=0.1))
"""


def other_process(place: Path) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _OTHER, str(folder), str(place)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(folder.parent)},
    )
    return done.stdout.strip().splitlines()[-1]


def test_another_process_loads_what_this_one_computed(
    model: LanguageModel, place: Prefixes, tmp_path: Path
) -> None:
    """Also while this one reads there."""
    options: dict[str, Any] = {"preset": "kvdrive", "budget": 0.1}
    answer(model, text(230), place, **options)
    expected = answer(model, text(230), place, **options)
    assert expected[1] == kept(230, 230)
    with place.opened(to_save=False) as store:
        assert store is not None
        assert other_process(tmp_path / "prefixes") == str(expected)


def test_a_place_that_another_one_writes_to_is_done_without(
    model: LanguageModel, tmp_path: Path
) -> None:
    place = prefixes(tmp_path / "prefixes", wait=0.0)
    expected = answer(model, text(230), place)
    with place.opened(to_save=True):
        assert answer(model, text(230), place) == (expected[0], 0)
    assert answer(model, text(230), place) == (expected[0], kept(230, 230))


def test_an_open_store_serves_as_a_place(model: LanguageModel, tmp_path: Path) -> None:
    with KeyedStore(tmp_path / "store", Identity(model="any"), disk="16MiB") as store:
        expected = answer(model, text(230), store)
        assert answer(model, text(230), store) == (expected[0], kept(230, 230))
        assert not store.is_closed


def narrow(budget: float = 0.0625) -> Preset:
    return Preset("narrow", ExactIndex, block_tokens=8, budget=budget)


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (lambda: llama(rms_norm_eps=1e-3), {}),
        (lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 999.0}), {}),
        (lambda: llama().bfloat16(), {}),
        (llama, {"preset": narrow()}),
        (llama, {"preset": Preset("sinks", ExactIndex, sinks=8)}),
    ],
    ids=["norm", "rope", "dtype", "block size", "sinks"],
)
def test_another_model_or_cut_finds_nothing(
    model: LanguageModel,
    place: Prefixes,
    other: Callable[[], LanguageModel],
    options: dict[str, Any],
) -> None:
    answer(model, text(230), place)
    changed = other()
    assert answer(changed, text(230), place, **options)[1] == 0
    new, loaded = answer(changed, text(230), place, **options)
    assert loaded >= 3 * PIECE
    assert new == answer(changed, text(230), None, **options)[0]


def test_other_weights_find_nothing(model: LanguageModel, place: Prefixes) -> None:
    answer(model, text(230), place)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] += 1
    assert answer(model, text(230), place)[1] == 0


def test_another_preset_with_the_same_blocks_makes_its_index_from_the_keys(
    model: LanguageModel, place: Prefixes
) -> None:
    """The oracle computes the rest after a pass over just the tokens that are loaded.

    Without the prompt's last queries, as `ExactIndex` needs none.
    """
    prompt, cut = text(230), kept(230, 230)
    answer(model, prompt, place, preset="kvdrive")
    with torch.no_grad(), attach(model, **SPARSE) as cache:  # type: ignore[arg-type]
        model(torch.tensor([prompt[:cut]]), **cache.kwargs)
        model(torch.tensor([prompt[cut:-1]]), **cache.kwargs)
        expected = greedy(model, cache.kwargs, prompt, 8)
    with torch.no_grad(), attach(model, prefixes=place, **SPARSE) as cache:  # type: ignore[arg-type]
        model(torch.tensor([prompt[:-1]]), **cache.kwargs)
        assert cache.loaded_tokens == [cut]
        assert greedy(model, cache.kwargs, prompt, 8) == expected


def test_an_index_that_can_differ_between_processes_is_not_kept_for_others(
    model: LanguageModel, place: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = Preset("own", lambda shape: HierarchicalIndex(shape, tokens_per_centroid=30))
    answer(model, text(230), place, preset=preset)
    expected = answer(model, text(230), None, preset=preset)[0]
    monkeypatch.setattr("tierstore.adapters.attention.prefix_records._PROCESS", "another")
    assert answer(model, text(230), place, preset=preset) == (expected, kept(230, 230))


@pytest.mark.parametrize("seed", range(6))
def test_damage_makes_a_prefix_shorter_and_never_wrong(
    model: LanguageModel, tmp_path: Path, seed: int
) -> None:
    place = prefixes(tmp_path / "prefixes")
    expected, _ = answer(model, text(300), place)
    files = [
        path for path in (tmp_path / "prefixes").rglob("*.seg") if any(path.read_bytes()[4096:])
    ]
    generator = torch.Generator().manual_seed(seed)
    for path in files:
        data = bytearray(path.read_bytes())
        used = [i for i in range(4096, len(data), 4096) if any(data[i : i + 4096])]
        at = used[int(torch.randint(len(used), (1,), generator=generator))]
        data[at + 100] ^= 0xFF
        path.write_bytes(data)

    new, loaded = answer(model, text(300), place)

    assert new == expected
    assert loaded in (0, SINKS, *range(SINKS + PIECE, kept(300, 300) + 1, PIECE))


def test_every_piece_may_be_the_damaged_one(model: LanguageModel, tmp_path: Path) -> None:
    with KeyedStore(tmp_path / "store", Identity(model="any"), disk="16MiB") as store:
        expected, _ = answer(model, text(300), store)
        pieces = [key for key in store if key.startswith(b"block:64x")]
        assert len(pieces) == 4
        for key in pieces:
            value = store.get(key)
            assert value is not None
            store.put(key, value[:-1] + bytes([value[-1] ^ 1]))
            new, loaded = answer(model, text(300), store)
            assert new == expected
            assert loaded < kept(300, 300)
            assert answer(model, text(300), store)[1] == loaded, (
                "what is there is not written again"
            )
            store.put(key, value)
            assert answer(model, text(300), store) == (expected, kept(300, 300))


@pytest.mark.parametrize("tag", [b"index:", b"end:"])
def test_a_lost_index_is_made_from_the_keys(
    model: LanguageModel, tmp_path: Path, tag: bytes
) -> None:
    with KeyedStore(tmp_path / "store", Identity(model="any"), disk="16MiB") as store:
        answer(model, text(300), store, preset="exact")
        expected = answer(model, text(300), store, preset="exact", budget=0.1)[0]
        found = list(store.keys(prefix=tag))
        assert len(found) >= 4
        store.delete_many(found[:: 1 if tag == b"end:" else 2])
        assert answer(model, text(300), store, preset="exact", budget=0.1) == (
            expected,
            kept(300, 300),
        )


def test_a_batch_loads_as_many_columns_as_all_of_its_rows_have(
    model: LanguageModel, place: Prefixes
) -> None:
    inputs = left_padded(300, 180)
    long, short = inputs["input_ids"][0].tolist(), inputs["input_ids"][1, 120:].tolist()
    expected = model.generate(**inputs, **own_cache(model), max_new_tokens=8, do_sample=False)
    with attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
        first = model.generate(**inputs, **cache.kwargs, max_new_tokens=8, do_sample=False)
        assert cache.loaded_tokens == [0, 0]
    with attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
        again = model.generate(**inputs, **cache.kwargs, max_new_tokens=8, do_sample=False)
        columns = min(kept(300, 300), 120 + kept(180, 180))
        assert cache.loaded_tokens == [columns, columns - 120]
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
    assert answer(model, short, place)[1] == kept(180, 180)
    assert answer(model, long, place)[1] == kept(300, 300)


def test_a_row_of_which_nothing_is_kept_keeps_the_others_from_loading_beyond_it(
    model: LanguageModel, place: Prefixes
) -> None:
    """The short row begins in column 200, so that much of the long one can still be loaded."""
    inputs = left_padded(300, 100)
    answer(model, inputs["input_ids"][0].tolist(), place)
    expected = model.generate(**inputs, **own_cache(model), max_new_tokens=8, do_sample=False)
    with attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
        found = model.generate(**inputs, **cache.kwargs, max_new_tokens=8, do_sample=False)
        assert cache.loaded_tokens == [200, 0]
    assert torch.equal(found, expected)


def test_beams_of_a_loaded_prompt_are_those_of_the_model_alone(
    model: LanguageModel, place: Prefixes
) -> None:
    ids = torch.tensor([text(200)])
    expected = model.generate(ids, **own_cache(model), num_beams=3, max_new_tokens=6)
    for loaded in (0, kept(200, 200)):
        with attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
            found = model.generate(ids, **cache.kwargs, num_beams=3, max_new_tokens=6)
            assert torch.equal(found, expected)
            assert cache.loaded_tokens[0] == loaded


def test_texts_go_on_after_a_load_as_they_do_after_a_prefill(
    model: LanguageModel, place: Prefixes
) -> None:
    """A second turn, a crop into what was loaded, and a third; beside them a model left alone."""
    answer(model, text(230), place)
    twin = llama()
    with torch.no_grad(), attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
        own = own_cache(twin)
        (dynamic,) = own.values()
        for seed, crop in ((1, 0), (5, 120), (6, 30)):
            ids = torch.tensor([text(230 if seed == 1 else 50, seed)])
            if crop:
                cache.crop(-crop)
                dynamic.crop(-crop)
            expected = twin(ids, **own).logits[0, -1]
            torch.testing.assert_close(
                model(ids, **cache.kwargs).logits[0, -1], expected, rtol=1e-4, atol=1e-4
            )
        assert cache.loaded_tokens == [kept(230, 230)]
        cache.reset()
        assert greedy(model, cache.kwargs, text(230), 4) == greedy(
            twin, own_cache(twin), text(230), 4
        )


def test_chunks_are_kept_and_decoded_tokens_are_not(model: LanguageModel, place: Prefixes) -> None:
    """What sparse steps computed is no prefill's, so a later turn is not kept."""
    prompt = text(300)
    with torch.no_grad(), attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
        for start, stop in ((0, 90), (90, 200), (200, 300)):
            model(torch.tensor([prompt[start:stop]]), **cache.kwargs)
        model(torch.tensor([prompt[:1]]), **cache.kwargs)
        model(torch.tensor([text(100, seed=9)]), **cache.kwargs)
    assert answer(model, [*prompt, 5, 6, 7], place)[1] == kept(300, 303)
    whole = [*prompt, prompt[0], *text(100, seed=9)]
    assert answer(model, whole, place)[1] == kept(300, 401)


def test_unusual_positions_are_computed_as_without_prefixes(
    model: LanguageModel, place: Prefixes
) -> None:
    prompt = torch.tensor([text(200)])
    positions = torch.arange(200)[None] + 7
    for _ in range(2):
        with torch.no_grad(), attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
            model(prompt, position_ids=positions, **cache.kwargs)
            assert cache.loaded_tokens == [0]
    padded = left_padded(200, 150)
    for _ in range(2):  # without positions, transformers counts the padding in
        with torch.no_grad(), attach(model, prefixes=place, **ALL) as cache:  # type: ignore[arg-type]
            model(**padded, **cache.kwargs)
            assert cache.loaded_tokens == [0, 0]


def test_a_small_place_keeps_what_fits(model: LanguageModel, tmp_path: Path) -> None:
    place = Prefixes(tmp_path / "prefixes", disk="3MiB")
    for seed in range(12):
        answer(model, text(300, seed), place, 1)
    size = sum(path.stat().st_size for path in (tmp_path / "prefixes").rglob("*.seg"))
    assert size <= 3 << 20
    new, loaded = answer(model, text(300, 11), place)
    assert new == answer(model, text(300, 11), None)[0]
    assert loaded > 0
    assert answer(model, text(300, 0), None)[0] == answer(model, text(300, 0), place)[0]


def test_models_and_engines_that_cannot_reuse_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "prefixes"
    with pytest.raises(UnsupportedModelError, match="some of its layers slide"):
        attach(gemma3(), dram="1MiB", prefixes=place)
    with pytest.raises(UnsupportedModelError, match=r"rotary angles \(longrope\)"):
        attach(phi3_with_longrope(), dram="1MiB", prefixes=place)
    model = llama()
    with pytest.raises(ConfigError, match="changes what it stores"):
        attach(model, dram="1MiB", disk=tmp_path / "kv", disk_codec="int8", prefixes=place)
    with pytest.raises(ConfigError, match="DenseEngine, expected a SparseAttention"):
        attach_engine(model, DenseEngine(geometry_of(model)), prefixes=place)
    for wrong in (3, tmp_path / "no" / "parent"):
        with pytest.raises(ConfigError, match="prefixes="):
            attach(model, dram="1MiB", prefixes=wrong)  # type: ignore[arg-type]
    attach(model, dram="1MiB").close()
    assert not place.exists()
