"""Engines in which every token's attention has FP8 products: what is written, and what is
refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fp8_build import LIMITS, attributes_of, plan_engine, write_llama

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_kernels import kernel_specs, plan_chains
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.builder.step_limits import step_limits
from llmctl.builder.validation.plan import check_plan
from llmctl.errors import BadConfig, CorruptEngine, Unsupported
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens

PROMPTS = {"use_fp8_context_fmha": "enable"}
GENERATION = {"use_fp8_generation_fmha": "enable"}
ON = {**PROMPTS, **GENERATION}
CHAINS = {"max_draft_len": 4}
TREES = {"speculative_decoding_mode": "lookahead_decoding", "lookahead_config": "[3,3,3]"}
ATTENTION = "paged_attention."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("checkpoint") / "llama", intermediate_size=256)


@pytest.fixture(scope="module")
def planned(checkpoint: Path) -> Callable[..., EnginePlan]:
    """planned(plugins, **request fields) -> an engine that nothing is compiled for."""

    def plan(plugins=ON, folder=checkpoint, **fields) -> EnginePlan:
        return plan_engine(folder, plugins, **fields)

    return plan


def test_every_layer_says_so_and_nothing_else_differs(planned) -> None:
    found, prompts = planned(), planned(plugins=PROMPTS)
    assert found.plan.fp8_tokens is Fp8Tokens.ALL and found.config.has_fp8_generation
    assert prompts.plan.fp8_tokens is Fp8Tokens.PROMPTS and not prompts.config.has_fp8_generation
    kinds = attributes_of(found.plan)
    assert len(kinds) > 1 and all(kind.pop("fp8_generation") is True for kind in kinds)
    assert kinds == attributes_of(prompts.plan), "an engine without says nothing of it"
    assert found.config.plugin_config == {**prompts.config.plugin_config, **GENERATION}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_has_two_ways_to_attend_and_none_of_16_bits(planned, ranks: int) -> None:
    """A rank of several for its own heads: four have a query head and a KV head each."""
    engine = planned(**CHAINS, tp_size=ranks)
    specs = specs_of(engine)
    attention = [spec for spec in specs if spec.name.startswith(ATTENTION)]
    kinds = {spec.name.split(".")[1] for spec in attention}
    assert kinds == {"images_fp8", "chunk_fp8", "few_fp8"}
    heads = {(spec.constants["HEADS"], spec.constants["GROUP"]) for spec in attention}
    assert heads == {(max(2 // ranks, 1), 2 if ranks < 4 else 1)}
    assert all(kind["fp8_generation"] is True for kind in attributes_of(engine.plan))
    assert not [spec for spec in specs if spec.name.startswith("kv_compact")], "for trees"


def specs_of(engine: EnginePlan):
    return kernel_specs(engine.plan, step_limits(engine.plan, engine.config.build_config))


def test_no_step_is_one_launch(tmp_path: Path) -> None:
    """Whose attention has 16-bit products, in an engine that would have it otherwise."""
    from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

    write_checkpoint(tmp_path / "planted", Recipe("8b", "draft", 0.8, 5, "fp8"), config_only=True)
    found = {}
    for name, plugins in (("all", ON), ("prompts", PROMPTS)):
        engine = plan_build(
            tmp_path / "planted",
            BuildRequest(**LIMITS),
            backend="cuda",
            plugins=plugins,
            load_format=LoadFormat("planted", 5),
            with_binaries=False,
        )
        limits = step_limits(engine.plan, engine.config.build_config)
        found[name] = len(plan_chains(engine.plan, limits))
    assert found["prompts"] > 0 and found["all"] == 0


def test_one_option_without_the_other_is_refused_with_both_names(planned) -> None:
    for plugins in (GENERATION, {**GENERATION, "use_fp8_context_fmha": "disable"}):
        with pytest.raises(
            BadConfig, match="fp8_generation_fmha enable .*--use_fp8_context_fmha is"
        ) as e:
            planned(plugins=plugins)
        assert e.value.fix == "--use_fp8_context_fmha enable, or --use_fp8_generation_fmha disable"


@pytest.mark.parametrize(
    ("fields", "found", "fix"),
    [
        ({"kv_cache_dtype": "none"}, "which is bfloat16; FP8", "--kv-cache-dtype fp8"),
        (
            TREES,
            "lookahead_decoding verifies trees; none or draft_tokens_external is wanted",
            "--speculative-decoding-mode draft_tokens_external",
        ),
    ],
)
def test_what_has_no_kernels_is_refused_by_name(planned, fields, found, fix) -> None:
    with pytest.raises(Unsupported, match=found) as caught:
        planned(**fields)
    assert fix in caught.value.fix and "--use_fp8_generation_fmha disable" in caught.value.fix
    planned(plugins=None, **fields)


@pytest.mark.parametrize(("mode", "drafts"), [("medusa", 4), ("eagle", 4), ("redrafter", 25)])
def test_heads_are_refused_as_their_drafts_are_trees(
    tmp_path: Path, mode: str, drafts: int
) -> None:
    from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

    write_checkpoint(tmp_path / "planted", Recipe("8b", "target", 0.8, 5, "fp8"), config_only=True)
    request = BuildRequest(**LIMITS, max_draft_len=drafts, speculative_decoding_mode=mode)
    with pytest.raises(Unsupported, match=f"--speculative-decoding-mode {mode} verifies trees"):
        plan_build(
            tmp_path / "planted",
            request,
            backend="cuda",
            plugins=ON,
            load_format=LoadFormat("planted", 5),
            with_binaries=False,
        )


def test_heads_and_windows_without_a_kernel_are_refused(planned, tmp_path: Path) -> None:
    narrow = write_llama(tmp_path / "narrow", head_dim=64)
    with pytest.raises(Unsupported, match="head size 128; this model's is 64") as caught:
        planned(folder=narrow)
    assert caught.value.fix == "--use_fp8_context_fmha disable --use_fp8_generation_fmha disable"
    sliding = write_llama(tmp_path / "sliding", "mistral", sliding_window=500)
    with pytest.raises(Unsupported, match="no kernel for attention windows; .* 500 tokens"):
        planned(folder=sliding)


def test_limits_need_no_room_for_groups_of_a_prompt(planned) -> None:
    drafts = {"max_draft_len": 270, "max_seq_len": 600}
    for fields in ({"max_num_tokens": 20}, {"max_seq_len": 60}, drafts):
        assert planned(**fields).plan.fp8_tokens is Fp8Tokens.ALL
        with pytest.raises(BadConfig):
            planned(plugins=PROMPTS, **fields)


def test_the_note_for_long_contexts_names_both_where_drafts_are_verified(planned) -> None:
    def notes(**fields: object) -> list[str]:
        fields = {"max_seq_len": 32_768, "kv_cache_dtype": "fp8", **fields}
        notices = planned(plugins=None, **fields).notices
        return [note for note in notices if "--use_fp8_context_fmha enable" in note]

    option = "--use_fp8_generation_fmha enable beside it makes verification of drafts FP8, too"
    (plain,), (chains,) = notes(), notes(**CHAINS)
    assert option not in plain and option in chains
    (trees,) = notes(**TREES)
    assert option not in trees


def changed(engine: EnginePlan, **attributes: bool | None) -> EnginePlan:
    """With attributes of the first layer's attention set, or left out (None)."""
    first = next(op for op in engine.plan.ops if op.op == "paged_attention")
    kept = {k: v for k, v in {**first.attributes, **attributes}.items() if v is not None}
    ops = tuple(replace(op, attributes=kept) if op is first else op for op in engine.plan.ops)
    return replace(engine, plan=replace(engine.plan, ops=ops))


def test_a_strangers_plan_that_says_two_things_is_corrupt(planned) -> None:
    engine, prompts = planned(), planned(plugins=PROMPTS)
    for broken, message in (
        (changed(engine, fp8_context=None), "has fp8_generation without fp8_context"),
        (changed(engine, fp8_generation=None), "use_fp8_generation_fmha of .*'enable'.*'disable'"),
        (changed(prompts, fp8_generation=True), "generation_fmha of .*'disable'.*'enable'"),
        (changed(engine, fp8_generation=1), "fp8_generation"),
    ):
        with pytest.raises(CorruptEngine, match=message):
            check_plan(broken.config, broken.plan, has_binaries=False)


def test_a_strangers_engine_for_trees_is_corrupt(planned) -> None:
    trees = planned(plugins=None, **TREES)
    config = replace(trees.config, plugin_config={**trees.config.plugin_config, **ON})
    ops = tuple(
        replace(op, attributes={**op.attributes, **Fp8Tokens.ALL.attributes})
        if op.op == "paged_attention"
        else op
        for op in trees.plan.ops
    )
    with pytest.raises(CorruptEngine, match="speculative_decoding_mode with trees is True"):
        check_plan(config, replace(trees.plan, ops=ops), has_binaries=False)


def test_an_engine_older_than_the_option_has_it_not(planned) -> None:
    for plugins in (PROMPTS, None):
        engine = planned(plugins=plugins)
        said = dict(engine.config.plugin_config)
        del said["use_fp8_generation_fmha"]
        old = replace(engine.config, plugin_config=said)
        check_plan(old, engine.plan, has_binaries=False)
        assert not old.has_fp8_generation


@pytest.mark.parametrize("backend", ["cpu", "tensorrt", "tensorrt-rtx"])
def test_other_backends_refuse_it(backend: str) -> None:
    from llmctl.builder.plugin_config import resolve_plugins

    with pytest.raises(Unsupported, match=r"generation_fmha enable is refused: .*here: disable"):
        resolve_plugins(GENERATION, "bfloat16", True, backend)


def test_inspect_says_so(planned, tmp_path: Path) -> None:
    from llmctl.builder.build import run_build
    from llmctl.cli.inspect.engine import describe_engine
    from llmctl.cli.inspect.engine_text import engine_text

    run_build(planned(), tmp_path / "engine")
    described = describe_engine(tmp_path / "engine")
    assert described["has_fp8_context"] and described["has_fp8_generation"]
    text = "\n".join(" ".join(line.split()) for line in engine_text(described))
    assert "attention FP8 products for every token: drafts are chains" in text
