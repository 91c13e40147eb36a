"""The best ids of logits, kept by the product of many tokens: those of the logits that the same
product stores, thread by thread on a CPU, and what takes them in the interpreter; which steps of
which programs keep them; the binaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import emulated_warps
from support.cuda_program import STREAM, Recorder, binary
from support.kernel import launch_env

from llmctl.plugins.backends.cuda.best_ids import BestIds
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits, StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.ops.packed_linear import best
from llmctl.plugins.ops.packed_linear.arguments import best_keys
from llmctl.plugins.ops.packed_linear.kernel import kernels
from llmctl.plugins.ops.packed_linear.prefill import Variant, prefill_launch, variants_of
from llmctl.plugins.ops.sampling.reference import argmax_rows

FP8 = "float8_e4m3fn"
ROWS = 150  # several token tiles
STRIDE, OFFSET = 3, 1  # of the places of ids


def logits_call(vocab: int, **case: object) -> tuple[OpCall, LaunchEnv]:
    """Equal numbers at ids 64 apart; row 3 has NaN where it has a scale of its own, row 5 is zeros
    but for a bias."""
    sizes = {"outputs": vocab, "inner": 288, "tokens": ROWS, "dtype": FP8, "out": "float32"}
    given = {"x_scaling": "static", "bias": False, **sizes, **case}
    example = make_example("packed_linear", given, seed=vocab)
    inputs = example.call.inputs
    for role in ("weight", "weight_scale", "bias"):
        if role in inputs and vocab > 128:
            tile = 1 if role == "weight" else 64
            inputs[role][tile : 2 * tile] = inputs[role][:tile]
    inputs["x"][5] = 0
    if "x_scale" in inputs and len(inputs["x_scale"]) > 1:
        inputs["x_scale"][3] = float("nan")
    return example.call, launch_env(example)


def run(call: OpCall, env: LaunchEnv, variant: Variant, seed: int) -> None:
    blocks = 4 if variant.is_even else 2  # several tiles each, or one and a half
    launch = replace(prefill_launch(call, env, ROWS, variant), grid=(blocks, 1, 1))
    together = blocks if variant.is_even else 0
    emulated_warps.run([launch], seed, is_late=seed % 2 == 0, together=together)


@pytest.mark.parametrize(
    ("vocab", "case"),
    [
        (264, {}),
        (200, {"x_scaling": "per_token", "bias": True}),
        (64, {"x_scaling": "per_token"}),
        (5, {"bias": True}),
        (712, {"dtype": "float16"}),  # of which most tiles are below the best of those before
    ],
)
def test_ids_are_those_of_the_logits(vocab: int, case: dict[str, object]) -> None:
    """With every tile shape; what is behind the vocabulary is padding. Keys are cleared."""
    call, env = logits_call(vocab, **case)
    variants, logits = variants_of(best.best_call(call)), call.outputs["out"]
    run(call, env, variants[0], 1)
    wanted = torch.from_numpy(argmax_rows(logits.numpy())).int()
    assert (wanted[3] == -1) == (case.get("x_scaling") == "per_token") and len(wanted.unique()) > 1
    for seed, variant in enumerate(variants, 2):
        logits.fill_(7)
        run(best.best_call(call), env, variant, seed)
        assert (logits == 7).all(), "logits were stored"
        out = torch.full((ROWS * STRIDE,), -7, dtype=torch.int32)
        run_launches([best.take_launch(call, env, out, ROWS, stride=STRIDE, offset=OFFSET)])
        assert torch.equal(out[OFFSET::STRIDE], wanted), variant.name
        assert (out.view(ROWS, STRIDE)[:, [0, 2]] == -7).all()
        assert not best_keys(call, env).any(), "keys are left to the next step"


def product(vocab: int, rows: int, kind: torch.dtype = torch.bfloat16, **more: object) -> OpCall:
    """Of a hidden size of 4,096, on meta tensors; by the kernel for few tokens up to 64."""
    with torch.device("meta"):
        columns = 128 // kind.itemsize
        inputs = {
            "x": torch.empty(rows, 4096, dtype=kind),
            "weight": torch.empty(-(-vocab // 64), 4096 // columns, 64, columns, dtype=kind),
        }
        if kind.itemsize == 1:
            inputs["x_scale"] = torch.empty(1)
            inputs["weight_scale"] = torch.empty(len(inputs["weight"]) * 64)
        outputs = {"out": torch.empty(rows, vocab)}
    tactic = "64:n64r1c1s6k1g0f0;*:many"
    return OpCall("packed_linear", "head", inputs, outputs, dict(more), tactic)


def test_steps_of_many_rows_keep_best_ids() -> None:
    call = product(128_256, 256)
    found = BestIds([call])
    assert found.product is call
    assert [found.are_kept(rows) for rows in (1, 64, 65, 120)] == [False, False, True, True]


def test_where_logits_are_needed_or_ranks_have_shares_none_are_kept() -> None:
    many, few = product(128_256, 256), product(128_256, 64)
    gathering = OpCall("all_gather", "g", {"x": many.outputs["out"]}, {}, {"ranks": 2})
    partial = product(4096, 256, is_partial=True)
    for calls in ([], [few], [many, many], [many, gathering], [partial]):
        found = BestIds(calls)
        assert found.product is None and not found.are_kept(256)


def test_a_program_stores_logits_unless_the_best_ids_are_all_that_a_step_wants() -> None:
    call, _ = logits_call(130)
    limits = StepLimits(ROWS, ROWS, 4, 256, 3, 32, "bfloat16")
    specs = [*kernels(call, limits), *best.best_kernels(call, limits)]
    binaries = [replace(binary(spec.name), arguments=spec.arguments) for spec in specs]
    recorder, x = Recorder(), call.inputs["x"]
    driver: Any = recorder  # of the driver's methods those that are called
    program = CudaProgram([call], binaries, limits, "cpu", driver, row_inputs=[x])
    program.bind_kv_cache(torch.zeros(1, 3, 2, 1, 32, 16))
    assert best_keys(call, program._envs["rows"]).shape == (ROWS,)
    assert f"packed_linear.best.{ROWS}" in program._kernels._scratch, (
        "not before a graph is captured"
    )
    whole = StepShape(90, 1, 90, 90, 90)
    for shape in (whole, replace(whole, best_only=True)) * 2:
        program.enqueue(shape, STREAM)
    out = torch.zeros(90, dtype=torch.int32)
    program.launch([program.best_ids(out, 90)], STREAM)
    *products, taken = (name for name, *_ in recorder.launched)
    assert [".best" in name for name in products] == [False, True, False, True]
    assert taken == "packed_linear.take_best" and recorder.num_prepared == 3
    assert program.keeps_best(90) and not program.keeps_best(64)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_binaries_do_not_spill(kind: torch.dtype) -> None:
    limits = StepLimits(256, 256, 16, 4096, 127, 32, FP8)
    specs = best.best_kernels(product(128_256, 256, kind), limits)
    assert len({spec.name for spec in specs}) == len(specs) > 2
    assert all(compile_kernel(spec).local_bytes == 0 for spec in specs)
