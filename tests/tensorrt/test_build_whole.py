"""Whole models as one TensorRT plan, as the real builder makes them, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tensorrt.build import (
    compile_engine,
    linear_weights,
    plan_engine,
    profile_kernels,
    readers,
    types,
    write_config,
)
from support.tensorrt.checkpoints import FAMILIES, write_checkpoint

from llmctl.builder.tensorrt import whole
from llmctl.errors import Unsupported

LIMITS = {
    "kv_cache_type": "continuous",
    "kv_cache_dtype": "none",
    "max_batch_size": 16,
    "max_seq_len": 4096,
    "max_num_tokens": 1024,
    "max_draft_len": 4,
}
LAYERS = 3
KINDS = ("gemm", "runtime_fusion")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """built(form, ...) -> (engine, pieces) of an 8B model of few layers, each compiled once."""
    found = {}

    def build(form: str, layers: int = LAYERS, **options):
        limits = {**LIMITS, **options}
        key = (form, layers, *sorted(limits.items()))
        if key not in found:
            folder = write_config(tmp_path_factory.mktemp("8b"), form, num_hidden_layers=layers)
            found[key] = compile_engine(folder, **limits)
        return found[key]

    return build


def profiles_of(pieces, name: str):
    return {profile["name"]: layers for profile, layers in profile_kernels(pieces[name])}


@pytest.mark.parametrize("form", ["bfloat16", "fp8 per token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built(family: str, form: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", family, form, num_hidden_layers=2)
    limits = {**LIMITS, "max_seq_len": 128, "max_num_tokens": 64}
    _, pieces = compile_engine(checkpoint, **limits)
    has_windows = family == "mistral"
    assert list(pieces) == (["whole"] if has_windows else ["whole", "tree"])
    names = [profile["name"] for profile in pieces["whole"].profiles]
    assert names == ["context", "generation", "verify"]


def test_without_drafts_nothing_is_accepted(built) -> None:
    _, pieces = built("fp8", max_draft_len=0)
    assert list(pieces) == ["whole"]
    outputs = {b["name"] for b in pieces["whole"].bindings if not b["is_input"]}
    assert "tokens" in outputs and not outputs & {"accepted", "next_token"}
    assert [p["name"] for p in pieces["whole"].profiles] == ["context", "generation"]


@pytest.mark.parametrize("form", ["fp8", "fp8 per token"])
def test_every_linear_is_one_fp8_gemm_in_every_profile(built, form: str) -> None:
    engine, pieces = built(form)
    for piece in engine.pieces:
        weights = linear_weights(piece, fp8=True)
        assert len(weights) == 4 * LAYERS
        for name, layers in profiles_of(pieces, piece.name).items():
            for weight in weights:
                (product,) = readers(layers, weight)
                assert types(product["inputs"])[:2] == ["fp8", "fp8"], (name, product)
                assert product["kind"] in KINDS, (name, product)


def test_a_layer_of_generation_is_ten_kernels(built) -> None:
    """Four products, attention, five between them; one layer more is ten kernels more."""
    for form, wanted in (("fp8", 10), ("bfloat16", 10), ("fp8 per token", 10)):
        few, more = (
            len(profiles_of(built(form, count, max_draft_len=0)[1], "whole")["generation"])
            for count in (2, 3)
        )
        assert more - few == wanted, form


def test_a_layer_of_verification_is_eleven_kernels(built) -> None:
    """Attention over several tokens leaves its heads to be transposed by a kernel of its own."""
    for piece in ("whole", "tree"):
        few, more = (
            len(profiles_of(built("fp8", count)[1], piece)["verify"]) for count in (2, LAYERS)
        )
        assert more - few <= 11, piece


def test_attention_is_tensorrts_own_kernel(built) -> None:
    _, pieces = built("fp8")
    found = profiles_of(pieces, "whole")
    for name, kernel in (
        ("context", "gemm_mha"),
        ("generation", "gemv_mha"),
        ("verify", "gemm_mha"),
    ):
        assert sum(kernel in layer["name"] for layer in found[name]) == LAYERS, name


def test_caches_are_updated_in_place(built) -> None:
    """The kernel that writes a cache reads it under the same name; nothing reads a copy of it."""
    _, pieces = built("fp8")
    aliases = {b["name"]: b["alias"] for b in pieces["whole"].bindings if b["alias"]}
    caches = {f"cache_{kind}_{layer}" for kind in "kv" for layer in range(LAYERS)}
    assert aliases == {f"{name}_out": name for name in caches}
    for name, layers in profiles_of(pieces, "whole").items():
        for cache in caches:
            assert not readers(layers, cache), (name, cache)
            used = readers(layers, f"{cache}_out")
            writers = [
                x for x in layers if any(o.startswith(f"{cache}_out:") for o in x["outputs"])
            ]
            assert len(used) == 2 and len(writers) == 1, (name, cache)
            assert writers[0] in used and "mha" in used[1]["name"], (name, cache)


def test_no_activation_grows_with_the_capacity(built) -> None:
    """What grows is lists of a number for every few keys; expanded heads would be megabytes.

    Prompts are left out: they are one chunk, as long as the capacity.
    """
    small, large = (built("fp8", max_seq_len=length)[1] for length in (1024, 4096))
    head_bytes = 2 * 128  # one expanded key or value
    for piece in ("whole", "tree"):
        for before, after in zip(small[piece].profiles, large[piece].profiles, strict=True):
            if after["name"] == "context":
                continue
            batch, length = (after["sizes"][name][2] for name in ("batch", "length"))
            growth = (after["activation_bytes"] - before["activation_bytes"]) / 3072
            mask = 3 * length if piece == "tree" else length / 4
            assert growth <= batch * mask, (piece, after["name"], growth)
            assert growth < batch * head_bytes


def test_a_prompt_works_in_memory_for_its_tokens(built) -> None:
    """That of the gate and up products, whatever the heads."""
    profile = built("fp8", max_seq_len=4096)[1]["whole"].profiles[0]
    assert profile["sizes"]["length"] == [1, 4096, 4096]
    wide = 4096 * 2 * 14336 * 4
    assert wide < profile["activation_bytes"] < 1.6 * wide


def test_a_missing_barrier_would_be_seen(built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the query as an output the builder expands KV heads over the whole capacity."""
    piece = whole._piece

    def without_queries(*arguments, **options):
        made = piece(*arguments, **options)
        kept = tuple(b for b in made.bindings if not b.name.startswith("query_"))
        return replace(made, bindings=kept)

    monkeypatch.setattr(whole, "_piece", without_queries)
    small, large = (
        built("fp8", 1, max_seq_len=length, max_batch_size=15)[1]["whole"].profiles
        for length in (1024, 4096)
    )
    growth = (large[2]["activation_bytes"] - small[2]["activation_bytes"]) / 3072
    assert growth > 15 * 32 * 128


def test_trees_are_masked_and_accepted_inside(built) -> None:
    _, pieces = built("fp8")
    bindings = {b["name"]: b for b in pieces["tree"].bindings}
    assert tuple(bindings["attention_mask"]["shape"]) == ("batch", 1, "length", 4096)
    assert bindings["ancestors"]["dtype"] == "bfloat16" and "kv_length" not in bindings
    assert {"accepted", "node", "next_token"} <= set(bindings)


def test_an_fp8_cache_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    with pytest.raises(Unsupported, match="16 bits only") as caught:
        plan_engine(checkpoint, kv_cache_type="continuous", max_seq_len=96)
    assert "--kv-cache-dtype none" in caught.value.fix
