"""Engines of several ranks for a GPU: packed shards are the cpu's shards, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mxfp4 import Checkpoints
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_kernels import kernel_specs, scratch_bytes
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.plan import PlanOp
from llmctl.builder.step_limits import step_limits
from llmctl.builder.validation.plan import check_plan
from llmctl.errors import CorruptEngine, Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.ops.packed_linear import layout
from llmctl.plugins.schemes.table import find_form
from llmctl.runtime.engines.engine_file import OF_RANKS

LIMITS = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}


def plan(
    folder: Path, backend: str, plugins: dict[str, str] | None = None, **request: Any
) -> EnginePlan:
    request = BuildRequest(**LIMITS, **request)
    return plan_build(folder, request, backend=backend, plugins=plugins, with_binaries=False)


def limits_of(engine: EnginePlan) -> StepLimits:
    return step_limits(engine.plan, engine.config.build_config)


def order_of(op: PlanOp, rows: int) -> torch.Tensor:
    """Packed row i holds logical row [i]."""
    if op.op == "packed_linear_rope_kv":
        sizes = (op.attributes[name] for name in ("num_heads", "num_kv_heads", "head_size"))
        return layout.rope_order(*map(int, sizes))
    return layout.pair_order(rows // 2) if op.op.endswith("swiglu") else layout.plain_order(rows)


def require_same_shards(folder: Path, num_ranks: int) -> None:
    """Every packed weight, scale and bias of a rank is the cpu's, which test_rank_builds.py
    compares with the whole weights."""
    cpu = plan(folder, "cpu", tp_size=num_ranks)
    cuda = plan(folder, "cuda", tp_size=num_ranks)
    tensors = {tensor.name: tensor for tensor in cuda.plan.tensors}
    products = [op for op in cuda.plan.ops if op.op.startswith("packed_linear")]
    assert len(products) == 4 * 3 + 1  # layers, head

    def values(engine: EnginePlan, name: str, rank: int) -> torch.Tensor:
        return torch.cat(list(engine.sources[name].chunks(engine.shards[rank])))

    linears = {op.name: op for op in cpu.plan.ops if op.op == "linear"}
    for op in products:
        wanted = linears[op.name]
        for role in {"weight", "weight_scale", "bias"} & set(op.inputs):
            for rank in range(num_ranks):
                shard = values(cpu, wanted.inputs[role], rank)
                found = values(cuda, op.inputs[role], rank)
                assert tuple(found.shape) == tensors[op.inputs[role]].shape
                order = order_of(op, len(shard))
                if role == "weight":
                    form = find_form(str(found.dtype).removeprefix("torch."), op.attributes)
                    found = layout.numbers_of(found, len(order), shard.shape[1], form)
                restored = layout.restore(found, order)
                assert torch.equal(_bytes(restored), _bytes(shard)), (op.name, role, rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "fp8"), ("llama tied, biased", "bfloat16"), ("llama tied, biased", "fp8")],
)
def test_packed_shards_are_those_of_the_cpu(
    num_ranks: int, family: str, form: str, tmp_path: Path
) -> None:
    """131 tokens: the last ranks' tiles of the head are padding."""
    folder = write_checkpoint(tmp_path / "c", family, form, **HEADS)
    require_same_shards(folder, num_ranks)


@pytest.fixture
def coded(new_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of MXFP4 whose rows have their largest numbers in one rank's columns."""

    def made(**shape: int) -> Path:
        def model(family: str, **fields: Any) -> Any:
            made = new_model(family, **{**fields, **shape})
            with torch.no_grad():
                for layer in made.model.layers:
                    layer.mlp.down_proj.weight[:, : shape["intermediate_size"] // 2] *= 64
            return made

        return Checkpoints(tmp_path, model)("head")

    return made


def test_packed_shards_of_codes_are_cut_from_whole_rows(coded: Callable[..., Path]) -> None:
    folder = coded(num_attention_heads=8, num_key_value_heads=2, intermediate_size=512)
    cuda = plan(folder, "cuda", tp_size=2, dtype="bfloat16")
    cpu = plan(folder, "cpu", tp_size=2, dtype="bfloat16")
    for name in ("o_proj", "down_proj"):
        (op, *_) = [op for op in cuda.plan.ops if op.name.endswith(name)]
        form = find_form("uint8", op.attributes)
        for rank in (0, 1):
            name = op.inputs["weight"]
            wanted = torch.cat(list(cpu.sources[name].chunks(cpu.shards[rank])))
            found = torch.cat(list(cuda.sources[name].chunks(cuda.shards[rank])))
            order = layout.plain_order(len(wanted))
            numbers = layout.numbers_of(found, len(order), wanted.shape[1], form)
            assert torch.equal(_bytes(layout.restore(numbers, order)), _bytes(wanted))


def test_columns_that_are_no_whole_blocks_of_codes_are_refused(coded: Callable[..., Path]) -> None:
    folder = coded(num_attention_heads=8, num_key_value_heads=2, intermediate_size=288)
    with pytest.raises(Unsupported, match="144 columns .* packed mxfp4 weights are blocks of 256"):
        plan(folder, "cuda", tp_size=2, dtype="bfloat16")


def test_partial_sums_leave_a_product_unscaled_and_are_added_after_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama tied, biased", "fp8", **HEADS)
    engine = plan(folder, "cuda", tp_size=4)
    kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in engine.plan.tensors}
    for op in engine.plan.ops:
        if op.attributes.get("is_partial"):
            assert set(op.inputs) == {"x", "weight"} and kinds[op.outputs["out"]][0] == "float32"
        if op.op == "all_reduce":
            assert set(op.inputs) == {"x", "weight_scale", "x_scale", "bias"}
            assert kinds[op.outputs["out"]][0] == "bfloat16"
    last = engine.plan.ops[-1]
    assert (last.op, last.outputs["out"]) == ("all_gather", engine.plan.logits)
    limits = limits_of(engine)
    names = {spec.name for spec in kernel_specs(engine.plan, limits)}
    assert "all_reduce.bf16.w64.r4.weight_scale.x_scale.bias" in names
    assert "all_gather.w64.w131.r4" in names
    assert scratch_bytes(engine.plan, limits) > 0


def test_a_norm_is_part_of_the_sum_before_it_where_rows_have_whole_parts(tmp_path: Path) -> None:
    """Rows of 64 have not: there the operators stay two."""
    for hidden, is_fused in ((64, False), (256, True)):
        folder = tmp_path / str(hidden)
        write_checkpoint(folder, "llama", "fp8", **HEADS, hidden_size=hidden)
        engine = plan(folder, "cuda", tp_size=2)
        sums = [op for op in engine.plan.ops if op.op.startswith("all_reduce")]
        assert {op.op for op in sums} == {"all_reduce_norm" if is_fused else "all_reduce"}
        assert len(sums) == 2 * engine.config.pretrained_config["num_hidden_layers"]
        norms = [op for op in engine.plan.ops if op.op == "rms_norm"]
        norms += [op for op in engine.plan.ops if "norm_weight" in op.inputs]
        assert len(norms) == len(sums) + 1, "every norm once"
        names = {spec.name for spec in kernel_specs(engine.plan, limits_of(engine))}
        assert any(name.startswith("all_reduce_norm.peers.") for name in names) == is_fused
        pushing = [op for op in engine.plan.ops if "pushed_to" in op.attributes]
        assert len(pushing) == len(sums) * is_fused
        for words in ("pushed2", "given"):  # of products, and of what takes their sums
            assert any(words in name.split(".") for name in names) == is_fused
    assert [op.attributes["pushed"] for op in sums] == [64] * len(sums), "kernels for few tokens"
    # The sum before the last attention gives its stream to the rows that are gathered, and what
    # follows the last sum does not read it.
    keeping = [op.name for op in sums if op.attributes.get("keeps")]
    assert keeping == [op.name for op in sums[:-3]] + [sums[-2].name]


def test_reduce_fusion_asserts_that_every_sum_over_ranks_is_one_kernel_with_its_norm(
    tmp_path: Path,
) -> None:
    fusion = {"reduce_fusion": "enable"}
    whole = write_checkpoint(tmp_path / "whole", "llama", "fp8", **HEADS, hidden_size=256)
    narrow = write_checkpoint(tmp_path / "narrow", "llama", "fp8", **HEADS, hidden_size=64)
    assert plan(whole, "cuda", fusion, tp_size=2).config.plugin_config == {
        **plan(whole, "cuda", tp_size=2).config.plugin_config,
        **fusion,
    }
    said = r"6 sums over 2 ranks, .*layers\.0\..* with rows of 64, have no kernel that also norm"
    for backend in ("cuda", "cpu"):
        with pytest.raises(Unsupported, match=said):
            plan(narrow, backend, fusion, tp_size=2)
        plan(narrow, backend, tp_size=2)
    with pytest.raises(Unsupported, match="with rows of 256, have no kernel that also normalizes"):
        plan(whole, "cpu", fusion, tp_size=2)


@pytest.mark.parametrize(
    ("op", "attributes", "said"),
    [
        ("packed_linear", {"pushed_to": 4}, "hands sums to 4 ranks"),
        ("all_reduce_norm", {"pushed": 8}, "takes other sums than the product before it hands on"),
        ("packed_linear", {"pushed_to": None}, "takes other sums"),
        ("all_reduce_norm", {"pushed": None}, "takes other sums"),
    ],
)
def test_a_plan_whose_ranks_would_wait_for_each_other_is_refused(
    tmp_path: Path, op: str, attributes: dict[str, int | None], said: str
) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama", "fp8", **HEADS, hidden_size=256)
    engine = plan(folder, "cuda", tp_size=2)
    target = next(each for each in engine.plan.ops if each.op == op and "o_proj" in each.name)
    changed = {**target.attributes, **attributes}
    edited = replace(target, attributes={k: v for k, v in changed.items() if v is not None})
    ops = tuple(edited if each is target else each for each in engine.plan.ops)
    check_plan(engine.config, engine.plan, has_binaries=False)
    with pytest.raises(CorruptEngine, match=said):
        check_plan(engine.config, replace(engine.plan, ops=ops), has_binaries=False)


def test_a_plan_that_reads_rows_which_another_rank_keeps_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama", "fp8", **HEADS, hidden_size=256)
    engine = plan(folder, "cuda", tp_size=2)
    gathered = {op.inputs["x"] for op in engine.plan.ops if op.op == "gather_rows"}
    (before,) = [op for op in engine.plan.ops if op.outputs.get("residual_out") in gathered]
    edited = replace(before, attributes={**before.attributes, "keeps": 1})
    ops = tuple(edited if each is before else each for each in engine.plan.ops)
    with pytest.raises(CorruptEngine, match="gather.* reads '.*', of which ranks keep rows"):
        check_plan(engine.config, replace(engine.plan, ops=ops), has_binaries=False)


WIDE = {**HEADS, "head_dim": 128, "hidden_size": 128, "intermediate_size": 2048}


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("form", ["fp8", "bfloat16"])
def test_sums_for_every_tp_size_are_parts_of_which_ranks_have_whole_ones(
    tmp_path: Path, form: str, num_ranks: int
) -> None:
    """Part l of a rank's weight is columns of the whole one, in rows of its own."""
    folder = write_checkpoint(tmp_path / "c", "llama", form, **WIDE)
    engine = plan(folder, "cuda", tp_size=num_ranks, tp_invariant=True)
    whole = plan(folder, "cpu")
    leaves, kinds = 8 // num_ranks, {t.name: (t.dtype, t.shape) for t in engine.plan.tensors}
    products = {op.name: op for op in engine.plan.ops if op.attributes.get("is_partial")}
    assert {name.rpartition(".")[2] for name in products} == {"o_proj", "down_proj"}
    for op in products.values():
        assert op.attributes["leaves"] == leaves and set(op.inputs) == {"x", "weight"}
        assert kinds[op.outputs["out"]] == ("float32", (op_rows(op, kinds), leaves * 128))
        name = op.inputs["weight"]
        wanted = torch.cat(list(whole.sources[name].chunks(whole.checkpoint)))
        for rank in range(num_ranks):
            packed = torch.cat(list(engine.sources[name].chunks(engine.shards[rank])))
            assert tuple(packed.shape) == kinds[name][1]
            own = wanted.chunk(8, dim=1)[rank * leaves : (rank + 1) * leaves]
            for part, numbers in zip(packed.chunk(leaves), own, strict=True):
                found = layout.numbers_of(
                    part, 128, numbers.shape[1], find_form(kinds[name][0], {})
                )
                assert torch.equal(_bytes(found), _bytes(numbers)), (name, rank)
    sums = [op for op in engine.plan.ops if op.op.startswith("all_reduce")]
    assert [op.attributes.get("leaves", 1) for op in sums] == [leaves] * len(products)
    assert [op.attributes["ranks"] for op in sums] == [num_ranks] * len(products)
    assert {op.op for op in sums} == {"all_reduce"}, "rows of 128 have no kernel with the norm"
    assert kernel_specs(engine.plan, limits_of(engine))


def op_rows(op: PlanOp, kinds: dict[str, Any]) -> int | str:
    shape: tuple[int | str, ...] = kinds[op.inputs["x"]][1]
    return shape[0]


@pytest.mark.parametrize(
    ("form", "fields", "said"),
    [
        ("fp8", {"head_dim": 64}, "o_proj adds 512 columns in 8 parts for 128 rows; .* of 128 col"),
        ("bfloat16", {"hidden_size": 64}, "1024 columns in 8 parts for 64 rows; .* of 128 rows"),
        ("fp8 per token", {}, "--tp-invariant: .*o_proj quantizes each token by its largest"),
    ],
)
def test_shapes_without_whole_parts_are_refused_by_name(
    tmp_path: Path, form: str, fields: dict[str, int], said: str
) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama", form, **{**WIDE, **fields})
    with pytest.raises(Unsupported, match=said):
        plan(folder, "cuda", tp_invariant=True)


def test_codes_have_no_parts(coded: Callable[..., Path]) -> None:
    folder = coded(num_attention_heads=8, num_key_value_heads=2, intermediate_size=512)
    with pytest.raises(Unsupported, match="--tp-invariant: weights of .* are codes"):
        plan(folder, "cuda", dtype="bfloat16", tp_invariant=True)


def test_one_rank_pays_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama", "fp8", **HEADS)
    plan_of_one = plan(folder, "cuda").plan
    assert not {op.op for op in plan_of_one.ops} & set(OF_RANKS)
    assert all("is_partial" not in op.attributes for op in plan_of_one.ops)
