"""The operators over ranks on a GPU: bits of the references in the interpreter, for every number of
ranks, and sums that the compiler must not fuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from support.kernel import disassemble, launch_env, step_shape

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import no_cache, plain_step
from llmctl.plugins.core.examples import Example
from llmctl.plugins.core.operators import operator_module
from llmctl.plugins.fused.all_reduce_norm import kernel as all_reduce_norm
from llmctl.plugins.fused.all_reduce_norm.spec import warps_of
from llmctl.plugins.ops.all_gather.reference import gather_ranks
from llmctl.plugins.ops.all_reduce.kernel import kernels
from llmctl.plugins.ops.all_reduce.peers import hops_of
from llmctl.plugins.ops.all_reduce.reference import reduce_ranks

COUNTS = (1, 2, 4, 8)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_on_rank(call: OpCall, parts: list[torch.Tensor]) -> torch.Tensor:
    example = Example(call, plain_step(len(parts[0])), no_cache())
    env = replace(launch_env(example), parts=lambda x, ranks: tuple(parts))
    launches = operator_module(call.op, "kernel").launches(call, env, step_shape(example.step))
    run_launches(launches)
    return call.outputs["out"]


def sum_call(
    parts: list[torch.Tensor], roles: tuple[str, ...], dtype: torch.dtype = torch.bfloat16
) -> OpCall:
    width = parts[0].shape[1]
    after = {
        "weight_scale": normal(width, seed=91).abs() + 0.5,
        "x_scale": torch.tensor([0.75]),
        "bias": normal(width, seed=92).to(dtype),
    }
    inputs = {"x": parts[0], **{role: after[role] for role in roles}}
    out = torch.zeros(parts[0].shape, dtype=dtype)
    return OpCall("all_reduce", "sum", inputs, {"out": out}, {"ranks": len(parts)})


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("roles", [(), ("weight_scale", "x_scale"), ("bias",),
                                   ("weight_scale", "x_scale", "bias")])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_are_added_as_a_balanced_tree(
    ranks: int, roles: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Width 1300 is a block and a part of one."""
    parts = [normal(3, 1300, seed=rank) for rank in range(ranks)]
    call = sum_call(parts, roles, dtype)
    wanted = {"out": torch.zeros_like(call.outputs["out"])}
    reduce_ranks(parts, call.inputs, wanted)
    assert torch.equal(run_on_rank(call, parts), wanted["out"])
    if ranks > 2 and dtype == torch.float32:  # another order is another number
        run_on_rank(call, [*reversed(parts[:-1]), parts[-1]])
        assert not torch.equal(call.outputs["out"], wanted["out"]), "the test would see it"


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("own", "columns"), [(64, 131), (64, 512), (192, 1500)])
def test_columns_of_all_ranks_lie_side_by_side(
    ranks: int, own: int, columns: int, dtype: torch.dtype
) -> None:
    """Those of the last ranks may be padding, of whole ranks, too."""
    columns = min(columns, own * ranks)
    parts = [normal(5, own, seed=rank).to(dtype) for rank in range(ranks)]
    out = torch.full((5, columns), torch.nan, dtype=dtype)
    call = OpCall("all_gather", "g", {"x": parts[0]}, {"out": out}, {"ranks": ranks})
    wanted = {"out": torch.empty_like(out)}
    gather_ranks(parts, wanted)
    assert torch.equal(run_on_rank(call, parts), wanted["out"])


def test_a_scaled_sum_is_rounded_before_the_bias_is_added() -> None:
    """One fused operation would round once, and have other bits than the product of one rank."""
    call = sum_call([normal(1, 256)] * 2, ("weight_scale", "x_scale", "bias"))
    specs = kernels(call, launch_env(Example(call, plain_step(1), no_cache())).limits)
    assert [spec.is_triton for spec in specs] == [True, False], "on one device, and on several"
    for spec in specs:
        compiled = compile_kernel(spec)
        sass = disassemble(compiled)
        assert "FFMA" not in sass and "FMUL" in sass and "FADD" in sass
        assert compiled.local_bytes == 0


def test_many_rows_take_two_hops_where_that_saves_more_than_it_costs() -> None:
    """Of 70B: a step of 13 tokens with four ranks, of 5 with eight."""
    assert hops_of(2, 5000, 8192) == 1
    most = {4: 12, 8: 4}  # rows of one hop
    for ranks, rows in most.items():
        assert [hops_of(ranks, rows + more, 8192) for more in (0, 1, 5000)] == [1, 2, 2]
        call = norm_call(ranks, rows)
        limits = launch_env(Example(call, plain_step(1), no_cache())).limits
        assert not any("two_hops" in spec.name for spec in all_reduce_norm.kernels(call, limits))
        (spec,) = [s for s in all_reduce_norm.kernels(norm_call(ranks, rows + 1), limits)
                   if "two_hops" in s.name]  # fmt: skip
        assert compile_kernel(spec).local_bytes == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_of_405b_are_normalized_in_the_launch_of_the_sum(ranks: int) -> None:
    """In one hop, in two, and where the product has given the sums; without spills, with registers
    for all blocks of a grid. Threads have 16 columns, as those of rms_norm."""
    assert [warps_of(width) for width in (8192, 8448, 12288, 16384, 16640)] == [4, 4, 4, 4, None]
    call = norm_call(ranks, 2048, 16384, {"pushed": 16})
    limits = launch_env(Example(call, plain_step(1), no_cache())).limits
    specs = [s for s in all_reduce_norm.kernels(call, limits) if ".peers." in s.name]
    assert len(specs) == (2 if ranks == 2 else 3)
    on_a_processor = -(-{2: 384, 4: 384, 8: 128}[ranks] // 132)
    for spec in specs:
        compiled = compile_kernel(spec)
        registers = -(-compiled.registers // 8) * 8 * 32 * spec.num_warps
        assert compiled.local_bytes == 0 and registers * on_a_processor <= 65536, spec.name


def norm_call(
    ranks: int, rows: int, width: int = 8192, more: Mapping[str, int] | None = None
) -> OpCall:
    stream = torch.empty((rows, width), dtype=torch.bfloat16, device="meta")
    inputs = {"x": stream.float(), "residual": stream, "norm_weight": stream[0]}
    attributes = {"ranks": ranks, "epsilon": 1e-5, **(more or {})}
    return OpCall("all_reduce_norm", "s", inputs, {"out": stream}, attributes)


def test_a_program_of_one_rank_refuses_what_several_have_parts_of() -> None:
    call = sum_call([normal(1, 256)] * 2, ())
    example = Example(call, plain_step(1), no_cache())
    with pytest.raises(AssertionError, match="a program of one rank computes what 2 ranks"):
        module = operator_module("all_reduce", "kernel")
        module.launches(call, launch_env(example), step_shape(example.step))
