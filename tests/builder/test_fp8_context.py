"""Engines whose prompts' attention has FP8 products: what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fp8_build import LIMITS, attributes_of, plan_engine, write_llama

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.builder.validation.plan import require_own_plan
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, apply_windows

ON = {"use_fp8_context_fmha": "enable"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="module")
def planned(checkpoint: Path) -> Callable[..., EnginePlan]:
    """planned(plugins, **request fields) -> an engine that nothing is compiled for."""

    def plan(plugins=ON, folder=checkpoint, **fields) -> EnginePlan:
        return plan_engine(folder, plugins, **fields)

    return plan


def test_every_layer_has_them_and_nothing_else_differs(planned) -> None:
    without, found = planned(plugins=None), planned()
    assert found.plan.fp8_tokens is Fp8Tokens.PROMPTS and without.plan.fp8_tokens is Fp8Tokens.NONE
    kinds = attributes_of(found.plan)
    assert len(kinds) > 1 and all(kind.pop("fp8_context") is True for kind in kinds)
    assert kinds == attributes_of(without.plan), "an engine without says nothing of it"
    ops = tuple(
        replace(op, attributes={k: v for k, v in op.attributes.items() if k != "fp8_context"})
        for op in found.plan.ops
    )
    assert replace(found.plan, ops=ops) == without.plan
    config = found.config.plugin_config
    assert config == {**without.config.plugin_config, **ON}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_them_and_heads_of_a_build_mode_have_not(tmp_path: Path, ranks: int) -> None:
    from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

    folder = tmp_path / "planted"
    write_checkpoint(folder, Recipe("tiny", "target", 0.6, 5, "fp8"), config_only=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "head_dim": 128, "num_hidden_layers": 8})
    )
    request = BuildRequest(
        **LIMITS, tp_size=ranks, max_draft_len=4, speculative_decoding_mode="eagle"
    )
    plan = plan_build(
        folder,
        request,
        backend="cuda",
        plugins=ON,
        load_format=LoadFormat("planted", 5),
        with_binaries=False,
    ).plan
    assert all(kind["fp8_context"] is True for kind in attributes_of(plan))
    heads = [op for head in plan.heads.values() for op in head.ops if op.op == "paged_attention"]
    assert heads and not any("fp8_context" in op.attributes for op in heads)


@pytest.mark.parametrize(
    ("fields", "error", "found", "fix"),
    [
        ({"kv_cache_dtype": "none"}, Unsupported, "which is bfloat16; FP8", "--kv-cache-dtype fp8"),
        ({"max_num_tokens": 256}, BadConfig, "256; .* 256 tokens .* up to 1 seq", "tokens 257"),
        ({"max_seq_len": 257}, BadConfig, "max_seq_len is 257, .* more than 256", "len 258"),
        (
            {"max_draft_len": 255, "max_seq_len": 600, "max_num_tokens": 900},
            BadConfig,
            "max_draft_len is 255; .* at most 254",
            "--max-draft-len 254",
        ),
    ],
)
def test_limits_that_rule_them_out_are_refused_by_name(planned, fields, error, found, fix) -> None:
    with pytest.raises(error, match=found) as caught:
        planned(**fields)
    assert fix in caught.value.fix and "--use_fp8_context_fmha disable" in caught.value.fix
    planned(plugins=None, **fields)


def test_long_prompts_without_them_are_a_note_where_nobody_said_so(planned) -> None:
    """And where they could be."""

    def notes(plugins: dict[str, str] | None = None, **fields: object) -> list[str]:
        fields = {"max_seq_len": 32_768, "kv_cache_dtype": "fp8", **fields}
        notices = planned(plugins=plugins, **fields).notices
        return [note for note in notices if "--use_fp8_context_fmha enable" in note]

    (note,) = notes()
    assert "texts change" in note and "disable keeps 16 bits" in note
    assert not notes(ON) and not notes({"use_fp8_context_fmha": "disable"})
    assert not notes(max_seq_len=32_767) and not notes(kv_cache_dtype="none")
    assert not notes(max_num_tokens=256), "limits rule them out"
    assert not notes(backend="cpu")


def test_limits_at_the_borders_are_taken(planned) -> None:
    for fields in (
        {"max_num_tokens": 257},
        {"max_seq_len": 258, "max_num_tokens": 300},
        {"max_draft_len": 254, "max_seq_len": 600},
        {"tokens_per_block": 8},
        {"tokens_per_block": 128},
    ):
        assert planned(**fields).plan.fp8_tokens is Fp8Tokens.PROMPTS


@pytest.mark.parametrize("head_dim", [64, 80])
def test_head_sizes_without_a_kernel_are_refused(planned, tmp_path: Path, head_dim: int) -> None:
    folder = write_llama(tmp_path / "c", head_dim=head_dim)
    with pytest.raises(Unsupported, match=f"head size 128; this model's is {head_dim}"):
        planned(folder=folder)


def test_windows_are_refused_at_build_and_at_run_time(planned, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "c", "mistral", sliding_window=500)
    with pytest.raises(Unsupported, match="no kernel for attention windows; .* 500 tokens"):
        planned(folder=folder)
    full = planned(folder=folder, max_seq_len=400).plan
    assert full.fp8_tokens is Fp8Tokens.PROMPTS
    plan = planned().plan
    with pytest.raises(Unsupported, match="with FP8 products see all") as caught:
        apply_windows(plan, WindowOptions((300,)), 800, "cuda")
    assert "--use_fp8_context_fmha disable" in caught.value.fix
    assert apply_windows(plan, WindowOptions((900,)), 800, "cuda") is plan


@pytest.mark.parametrize("backend", ["cpu", "tensorrt", "tensorrt-rtx"])
def test_other_backends_refuse_them(backend: str) -> None:
    from llmctl.builder.plugin_config import resolve_plugins

    with pytest.raises(Unsupported, match=r"fmha enable is refused: .*; accepted here: disable"):
        resolve_plugins(ON, "bfloat16", True, backend)


def test_an_engine_that_says_two_things_is_corrupt(planned) -> None:
    engine = planned()
    said = {**engine.config.plugin_config, "use_fp8_context_fmha": "disable"}
    with pytest.raises(AssertionError, match=r"use_fp8_context_fmha of .* 'disable'.* 'enable'"):
        require_own_plan(replace(engine.config, plugin_config=said), engine.plan)


def test_inspect_says_so(planned, tmp_path: Path) -> None:
    from llmctl.builder.build import run_build
    from llmctl.cli.inspect.engine import describe_engine
    from llmctl.cli.inspect.engine_text import engine_text

    for plugins, is_there in ((ON, True), (None, False)):
        folder = tmp_path / str(is_there)
        run_build(planned(plugins=plugins), folder)
        described = describe_engine(folder)
        lines = [" ".join(line.split()) for line in engine_text(described)]
        text = "\n".join(lines)
        assert described["has_fp8_context"] is is_there
        assert ("prompts attention with FP8 products, 256 tokens at a time" in text) is is_there
