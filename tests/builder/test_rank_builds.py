"""Engines of several ranks for the cpu: what each rank's file holds, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mxfp4 import SHAPE, Checkpoints
from support.ranks import require_whole
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import read_engine_config, read_plan
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.plan import PlanOp
from llmctl.builder.validation.plan import check_plan
from llmctl.cli.inspect.engine import describe_engine
from llmctl.cli.inspect.engine_text import engine_text
from llmctl.errors import CorruptEngine, EngineNotFound, Unsupported

LIMITS = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}
SIZE = 64  # of a head


def plan_cpu(folder: Path, **request: Any) -> EnginePlan:
    return plan_build(folder, BuildRequest(**LIMITS, **request), backend="cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", "llama tied, biased", "fp8", **HEADS)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("family", ["llama", "llama tied, biased", "qwen3"])
def test_the_shards_of_all_ranks_are_the_weights(
    num_ranks: int, family: str, tmp_path: Path
) -> None:
    """Two KV heads: four and eight ranks repeat them. 131 tokens: the last ranks' are padding."""
    form = "bfloat16" if family == "qwen3" else "fp8"
    folder = write_checkpoint(tmp_path / "c", family, form, **HEADS)
    rows = {"qkv_proj": (8 * SIZE, 2 * SIZE, 2 * SIZE), "gate_up_proj": (128, 128)}
    require_whole(plan_cpu(folder), plan_cpu(folder, tp_size=num_ranks), rows)


def test_shards_of_codes_are_cut_from_whole_rows(
    new_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Numbers depend on the largest power of two of a whole row, which one rank's part may lack."""

    def model(family: str, **fields: Any) -> Any:
        made = new_model(family, **{**fields, "num_attention_heads": 4})
        with torch.no_grad():
            for layer in made.model.layers:
                layer.mlp.down_proj.weight[:, : SHAPE["intermediate_size"] // 2] *= 64
        return made

    folder = Checkpoints(tmp_path, model)("head")
    heads, inner = 4 * 64, SHAPE["intermediate_size"]
    rows = {"qkv_proj": (heads, 64, 64), "gate_up_proj": (inner, inner)}
    require_whole(plan_cpu(folder), plan_cpu(folder, tp_size=2), rows)


def test_every_rank_has_a_file_of_one_plan(checkpoint: Path, tmp_path: Path) -> None:
    engine = plan_cpu(checkpoint, tp_size=2)
    config = run_build(engine, tmp_path / "e")
    assert sorted(config.files) == ["rank0.engine", "rank1.engine"]
    assert config.build_config["tp_size"] == 2 and config.build_config["sum_leaves"] == 1
    assert config.files["rank0.engine"] == config.files["rank1.engine"]
    assert [read_plan(tmp_path / "e", rank) for rank in (0, 1)] == [engine.plan] * 2
    assert engine.plan.kv_cache.num_kv_heads == 1
    lines = "\n".join(engine_text(describe_engine(tmp_path / "e")))
    assert "2, each with 4 of 8 heads and 1 of 2 KV heads; what follows is of one rank" in lines


def test_a_branch_is_summed_before_it_is_scaled_biased_and_rounded(checkpoint: Path) -> None:
    plan = plan_cpu(checkpoint, tp_size=2).plan
    sums = [op for op in plan.ops if op.op == "all_reduce"]
    assert len(sums) == 2 * 3  # layers
    assert all(set(op.inputs) == {"x", "weight_scale", "x_scale", "bias"} for op in sums)
    products = [op for op in plan.ops if op.attributes.get("is_partial")]
    assert [set(op.inputs) for op in products] == [{"x", "weight"}] * 6
    assert plan.ops[-1].op == "all_gather" and plan.ops[-1].outputs["out"] == plan.logits


def test_one_rank_pays_nothing(checkpoint: Path) -> None:
    plan = plan_cpu(checkpoint).plan
    assert not {"all_reduce", "all_gather"} & {op.op for op in plan.ops}
    assert all(not op.attributes for op in plan.ops if op.op == "linear")


def test_sums_for_every_tp_size_are_a_property_of_the_engine(checkpoint: Path) -> None:
    for num_ranks in (1, 2, 4, 8):
        engine = plan_cpu(checkpoint, tp_size=num_ranks, tp_invariant=True)
        assert engine.limits.sum_leaves == 8
        products = [op for op in engine.plan.ops if op.name.endswith(("o_proj", "down_proj"))]
        leaves = 8 // num_ranks
        assert [op.attributes["leaves"] for op in products] == [leaves] * 6


# ---- refusals ----

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "three ranks": ({}, {"tp_size": 3}, "--tp-size 3 is refused: .* 1, 2, 4, 8 ranks"),
    "heads": ({"num_attention_heads": 6}, {"tp_size": 4}, "num_attention_heads is 6"),
    "width": ({"intermediate_size": 132}, {"tp_size": 8}, "intermediate_size is 132"),
    "kv heads": (
        {"num_attention_heads": 24, "num_key_value_heads": 3},
        {"tp_size": 8},
        "num_key_value_heads is 3",
    ),
    "leaves": ({"intermediate_size": 192}, {"tp_invariant": True}, "192 wide; a multiple of 128"),
    "leaves of heads": (
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"tp_invariant": True},
        "the attention's output of the model is 64 wide",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_shapes_that_do_not_divide_are_refused_by_name(case: str, tmp_path: Path) -> None:
    fields, request, said = FIELDS[case]
    folder = write_checkpoint(tmp_path / "c", "llama", "bfloat16", **{**HEADS, **fields})
    with pytest.raises(Unsupported, match=said):
        plan_cpu(folder, **request)


def test_scales_of_single_tokens_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama", "fp8 per token", **HEADS)
    with pytest.raises(Unsupported, match="o_proj quantizes each token by its largest value"):
        plan_cpu(folder, tp_size=2)
    assert plan_cpu(folder, tp_invariant=True).limits.sum_leaves == 8  # one rank has whole rows


def test_backends_without_ranks_or_leaves_refuse_them(checkpoint: Path) -> None:
    for backend, request, said, fix in (
        (
            "cuda",
            {"tp_size": 3},
            "engines of the cuda backend have 1, 2, 4, 8 ranks",
            "--tp-size 2",
        ),
        ("tensorrt", {"tp_invariant": True}, "is refused: products of the tensorrt backend", ""),
    ):
        with pytest.raises(Unsupported, match=said) as refused:
            plan_build(checkpoint, BuildRequest(**LIMITS, **request), backend=backend)
        assert refused.value.fix.startswith(fix)


# ---- engines that somebody edited ----

Edit = Callable[[PlanOp], PlanOp]
EDITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "other ranks": ("all_reduce", {"ranks": 4}, "over 4 ranks; the engine has 2"),
    "three ranks": ("all_reduce", {"ranks": 3}, "is over 3 ranks"),
    "other parts": ("all_reduce", {"leaves": 4}, "shape|parts of a rank"),
    "other gathered ranks": ("all_gather", {"ranks": 8}, "over 8 ranks; the engine has 2"),
    "whole sums": ("linear", {"is_partial": False}, "wanted|without"),
    "other leaves": ("linear", {"leaves": 2}, "adds by .*; .* is wanted"),
    "broken leaves": ("linear", {"leaves": 3}, "has 3 leaves"),
    "a number for a flag": ("linear", {"is_partial": 1}, "is_partial is 1, wanted bool"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_plan_is_refused(case: str, checkpoint: Path) -> None:
    kind, attributes, said = EDITS[case]
    engine = plan_cpu(checkpoint, tp_size=2, tp_invariant=True)
    target = next(
        op for op in engine.plan.ops if op.op == kind and ("o_proj" in op.name or "lm" in op.name)
    )
    edited = replace(target, attributes={**target.attributes, **attributes})
    ops = tuple(edited if op is target else op for op in engine.plan.ops)
    check_plan(engine.config, engine.plan)
    with pytest.raises(CorruptEngine, match=said):
        check_plan(engine.config, replace(engine.plan, ops=ops))


def test_a_config_that_says_other_ranks_is_refused(checkpoint: Path) -> None:
    engine = plan_cpu(checkpoint, tp_size=2)
    for field, value in (("tp_size", 1), ("tp_size", 4), ("sum_leaves", 8)):
        build = {**engine.config.build_config, field: value}
        with pytest.raises(CorruptEngine):
            check_plan(replace(engine.config, build_config=build), engine.plan)


def test_files_of_ranks_that_are_not_one_engine_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    """From config.json alone, before any of them is read."""
    for name, request in (("e", {}), ("other", {"max_draft_len": 2})):
        run_build(plan_cpu(checkpoint, tp_size=2, **request), tmp_path / name)
    written, other = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("e", "other")
    )
    first, second = written["files"].items()
    spare = ("rank2.engine", first[1])
    more = {**first[1], "more": 1}
    for files, said in (
        ([first], r"files lists \['rank0.engine'\]; rank0.engine to rank1.engine is wanted"),
        ([], r"files lists \[\]"),
        ([first, second, spare], "files lists .*'rank2.engine'"),
        ([first, ("rank1.engine", other["files"]["rank1.engine"])], "rank1.engine is not as"),
        ([("rank0.engine", more), ("rank1.engine", more)], "bytes and header_sha256 is wanted"),
        ([first, ("rank1.engine", None)], "files.rank1.engine is None"),
    ):
        text = json.dumps({**written, "files": dict(files)})
        (tmp_path / "e/config.json").write_text(text)
        with pytest.raises(CorruptEngine, match=said):
            read_engine_config(tmp_path / "e")


def test_a_rank_file_with_another_plan_or_none_is_named(checkpoint: Path, tmp_path: Path) -> None:
    for name, request in (("e", {}), ("other", {"max_draft_len": 2})):
        run_build(plan_cpu(checkpoint, tp_size=2, **request), tmp_path / name)
    path = tmp_path / "e/rank1.engine"
    path.write_bytes((tmp_path / "other/rank1.engine").read_bytes())
    with pytest.raises(CorruptEngine, match=r"rank1\.engine"):
        describe_engine(tmp_path / "e")
    path.unlink()
    with pytest.raises(EngineNotFound, match=r"rank1\.engine"):
        describe_engine(tmp_path / "e")
