"""The best ids that the product of many tokens keeps are those of the logits that it stores."""

from __future__ import annotations

import pytest
import torch
from support.gpu import execute
from support.kernel import device_step

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.ops.packed_linear import best
from llmctl.plugins.ops.packed_linear.prefill import prefill_launch, variants_of
from llmctl.plugins.ops.sampling.reference import argmax_rows

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("rows", [65, 120, 300])
@pytest.mark.parametrize(
    ("dtype", "vocab", "scaling"),
    [
        (FP8, 4099, "static"),
        (FP8, 4099, "per_token"),
        ("bfloat16", 4099, "static"),
        ("float16", 32_000, "static"),
    ],
)
def test_ids_are_those_of_the_logits(dtype: str, vocab: int, scaling: str, rows: int) -> None:
    """By every tile shape, launch after launch; equal logits, and a row with NaN."""
    sizes = {"outputs": vocab, "inner": 1056, "tokens": rows, "bias": False}
    types = {"dtype": dtype, "out": "float32", "x_scaling": scaling}
    example = make_example("packed_linear", {**sizes, **types}, seed=1)
    given = example.call
    inputs = {role: tensor.cuda() for role, tensor in given.inputs.items()}
    inputs["weight"][40] = inputs["weight"][3]
    if "weight_scale" in inputs:
        inputs["weight_scale"][40 * 64 : 41 * 64] = inputs["weight_scale"][3 * 64 : 4 * 64]
    inputs["x"][5], inputs["x"][7, 9] = 0, float("nan")
    logits = torch.zeros(rows, vocab, device="cuda")
    call = OpCall(given.op, given.name, inputs, {"out": logits}, given.attributes)
    scratch: dict[str, torch.Tensor] = {}

    def room(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return scratch.setdefault(name, torch.zeros(shape, dtype=dtype, device="cuda"))

    limits = StepLimits(rows, rows, 1, 512, 0, 32, FP8)
    env = LaunchEnv(device_step(example.step, "cuda"), torch.empty(0), limits, "rows", room)
    execute([prefill_launch(call, env, rows)])
    wanted = torch.from_numpy(argmax_rows(logits.cpu().numpy())).int()
    assert wanted[5] == 0 and wanted[7] == -1 and len(wanted.unique()) > rows // 3
    logits.zero_()
    for variant in variants_of(best.best_call(call)) * 3:
        out = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
        execute([prefill_launch(best.best_call(call), env, rows, variant)])
        execute([best.take_launch(call, env, out, rows)])
        assert torch.equal(out.cpu(), wanted), variant.name
    assert not logits.any(), "logits were stored"
