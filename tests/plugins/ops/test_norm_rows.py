"""Norms between products: which binary a step has, and on a CPU, thread by thread, what the
reference computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import emulated_warps
from support.kernel import launch_env, step_shape

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.core.example_parts import empty
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.ops.rms_norm.kernel import MOST_FEW, kernels, launches
from llmctl.plugins.ops.rms_norm.reference import add_and_normalize

RESERVED, HELD = 1 << 10, 228 << 10  # shared memory of a thread block, of a multiprocessor


def example_of(rows: int, hidden: int, dtype: str = "bfloat16", **case: object) -> Example:
    sizes = {"tokens": rows, "hidden": hidden, "dtype": dtype}
    return make_example("rms_norm", sizes | {"scaling": "static", "residual": True} | case)


def specs_of(example: Example, rows: int):
    env = replace(launch_env(example), use_pdl=True)
    shape = replace(step_shape(example.step), num_tokens=rows, num_rows=rows)
    (launch,) = launches(example.call, env, shape)
    assert launch.spec in kernels(example.call, env.limits)
    assert launch.grid == (rows, 1, 1) and len(launch.arguments) == len(launch.spec.arguments)
    return launch.spec


def test_each_row_has_a_multiprocessor_where_there_are_as_many():
    example = example_of(300, 512)
    specs = {rows: specs_of(example, rows) for rows in (1, 32, 33, 132, 133, 300)}
    assert not any(spec.is_triton for spec in specs.values())
    assert specs[1] == specs[32] != specs[33]
    assert specs[1].constants["FEW"] and not specs[33].constants["FEW"]
    assert specs[1].shared_bytes < RESERVED + 1  # finds room beside a product
    assert specs[33] == specs[132] != specs[133] == specs[300]
    assert 2 * (specs[33].shared_bytes + RESERVED) > HELD
    assert specs[33].shared_bytes <= HOPPER.max_shared_bytes
    assert specs[133].shared_bytes < RESERVED + 1


@pytest.mark.parametrize(
    "case", [{"scaling": "none"}, {"scaling": "per_token"}, {"residual": False}, {"hidden": 520}]
)
def test_what_it_does_not_compute_is_left_to_triton(case):
    example = example_of(64, **{"hidden": 512} | case)
    assert specs_of(example, 64).is_triton
    assert all(spec.is_triton for spec in kernels(example.call, launch_env(example).limits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [256, 1280, 2048])
def test_rows_are_what_the_reference_computes(hidden, dtype):
    example = example_of(MOST_FEW + 1, hidden, dtype)
    call = example.call
    call.inputs["x"][0] = 0
    call.inputs["residual"][0] = 0
    call.inputs["x"][1, 3] = float("nan")
    call.inputs["x"][2, 5] = 1e4
    for has_sums in (True, False):
        outputs = {"out": empty(call.inputs["x"].shape, "float8_e4m3fn")}
        if has_sums:
            outputs["residual_out"] = empty(call.inputs["x"].shape, dtype)
        found = replace(call, outputs=outputs)
        wanted = {role: torch.empty_like(tensor) for role, tensor in outputs.items()}
        env = replace(launch_env(example), use_pdl=True)
        emulated_warps.run(launches(found, env, step_shape(example.step)), seed=int(has_sums))
        few = {role: tensor.clone() for role, tensor in outputs.items()}
        shape = replace(step_shape(example.step), num_tokens=5, num_rows=5)
        for tensor in few.values():
            tensor.view(torch.uint8)[:5].fill_(0x55)
        (launch,) = launches(replace(found, outputs=few), env, shape)
        emulated_warps.run([launch], seed=2)
        assert launch.spec.constants["FEW"]
        for role, tensor in outputs.items():
            assert torch.equal(tensor.view(torch.uint8), few[role].view(torch.uint8)), role
        add_and_normalize(call.inputs, wanted, float(call.attributes["epsilon"]))
        for role, tensor in outputs.items():
            left, right = tensor.float(), wanted[role].float()
            torch.testing.assert_close(left, right, rtol=2**-3, atol=0, equal_nan=True)
            # but for sums of squares in another order
            assert (left != right)[~right.isnan()].float().mean() < 0.01
        assert outputs["out"][1].float().isnan().all() and not outputs["out"][0].float().any()


def test_every_row_may_be_stored_where_the_residual_is():
    first, second = example_of(300, 512), example_of(300, 512)
    env = replace(launch_env(first), use_pdl=True)
    emulated_warps.run(launches(first.call, env, step_shape(first.step)))
    call = second.call
    call.outputs["residual_out"] = call.inputs["residual"]
    emulated_warps.run(launches(call, env, step_shape(second.step)), seed=1)
    for role, tensor in first.call.outputs.items():
        assert torch.equal(tensor.view(torch.uint8), call.outputs[role].view(torch.uint8)), role


@pytest.mark.parametrize("hidden", [2048, 8192])
def test_it_compiles_without_spills(hidden):
    for rows in (11, 64):
        spec = specs_of(example_of(64, hidden), rows)
        assert compile_kernel(spec).local_bytes == 0
