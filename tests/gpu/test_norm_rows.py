"""Norms between products have the bits of Triton's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.gpu import execute
from support.kernel import launch_env, step_shape

from llmctl.plugins.core.examples import make_example
from llmctl.plugins.ops.rms_norm.kernel import launches


@pytest.mark.parametrize("scale", [0.037, 3.0, 2.0**-100, 2.0**100, 0.0, float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [256, 1280, 2048, 3072, 4096, 5120, 8192])
def test_norms_of_any_number_of_rows_have_the_bits_of_triton(hidden, dtype, scale):
    sizes = {"tokens": 600, "hidden": hidden, "dtype": dtype, "scaling": "static"}
    example = make_example("rms_norm", sizes | {"residual": True}, device="cuda")
    call = example.call
    call.inputs["scale"].fill_(scale)
    for row, factor in enumerate((1.0, 1e-4, 100.0, 0.0, 7.0)):
        call.inputs["x"][row] *= factor
        call.inputs["residual"][row] *= factor
    call.inputs["x"][5, 17] = float("nan")
    call.inputs["x"][6, 3] = float("inf")
    env = launch_env(example)
    for rows in (1, 11, 32, 33, 132, 133, 600):
        shape = replace(step_shape(example.step), num_tokens=rows, num_rows=rows)
        outcomes = []
        for use_pdl in (False, True):
            (launch,) = launches(call, replace(env, use_pdl=use_pdl), shape)
            assert launch.spec.is_triton != use_pdl
            for tensor in call.outputs.values():
                tensor.view(torch.uint8).fill_(0x55)
            torch.cuda.synchronize()
            execute([launch] * 3)
            outcomes.append([t.view(torch.uint8).clone() for t in call.outputs.values()])
        assert all(map(torch.equal, *outcomes)), rows
