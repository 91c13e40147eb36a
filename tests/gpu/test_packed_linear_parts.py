"""Parts of K that ranks may divide: a product with several has the bits of the products of each,
for few tokens and many."""

from __future__ import annotations

import pytest
import torch
from support.gpu import execute
from support.kernel import device_step

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits, StepShape
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.ops.packed_linear.kernel import launches

TOKENS, ROWS = 130, 128


def sums(call: OpCall, env: LaunchEnv, tokens: int) -> torch.Tensor:
    out = call.outputs["out"]
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    execute(launches(call, env, StepShape(tokens, 1, tokens, tokens, 512)))
    assert out[tokens:].isnan().all() and not out[:tokens].isnan().any()
    return out[:tokens].clone()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize(("parts", "inner"), [(8, 1024), (4, 7168), (2, 8192)])
def test_parts_are_products_of_their_own(dtype: str, parts: int, inner: int) -> None:
    case = {
        "tokens": TOKENS, "outputs": parts * ROWS, "inner": inner, "dtype": dtype,
        "out": "float32", "x_scaling": "static", "bias": False, "is_partial": True,
        "leaves": parts,
    }  # fmt: skip
    example = make_example("packed_linear", case, seed=3, device="cuda")
    call = example.call
    limits = StepLimits(TOKENS, TOKENS, 1, 512, 0, 32, "bfloat16")
    scratch: dict[str, torch.Tensor] = {}

    def room(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return scratch.setdefault(name, torch.zeros(shape, dtype=dtype, device="cuda"))

    step = device_step(example.step, "cuda")
    env = LaunchEnv(step, example.kv_cache, limits, "tokens", room)
    for tokens in (1, 11, 40, TOKENS):
        found = sums(call, env, tokens).chunk(parts, dim=1)
        pairs = zip(
            call.inputs["x"].chunk(parts, 1), call.inputs["weight"].chunk(parts), strict=True
        )
        for index, (x, weight) in enumerate(pairs):
            inputs = {"x": x.contiguous(), "weight": weight}
            out = {"out": torch.empty((TOKENS, ROWS), device="cuda")}
            alone = OpCall("packed_linear", "part", inputs, out, {"is_partial": True})
            assert torch.equal(sums(alone, env, tokens), found[index]), (tokens, index)
