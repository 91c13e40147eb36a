"""Random calls of the operators over ranks, for one rank. See examples.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import Example, empty, no_cache, plain_step, random_tensor
from llmctl.plugins.core.op_spec import FP8, Case


def _all_reduce(case: Case, generator: torch.Generator) -> Example:
    tokens, outputs, dtype = int(case["tokens"]), int(case["outputs"]), str(case["dtype"])
    leaves, attributes = _leaves(case)
    inputs = {"x": random_tensor((tokens, leaves * outputs), "float32", generator)}
    if case["scaled"]:
        inputs["weight_scale"] = torch.rand((outputs,), generator=generator) + 0.5
        inputs["x_scale"] = torch.rand((1,), generator=generator) + 0.5
    if case["bias"]:
        inputs["bias"] = random_tensor((outputs,), dtype, generator)
    made = {"out": empty((tokens, outputs), dtype)}
    call = OpCall("all_reduce", "sum", inputs, made, {"ranks": 1, **attributes})
    return Example(call, plain_step(tokens), no_cache())


def _leaves(case: Case) -> tuple[int, dict[str, int]]:
    """(parts of a rank's sum, the attributes that say so)."""
    leaves = int(case.get("leaves", 1))
    return leaves, {"leaves": leaves} if "leaves" in case else {}


def _all_reduce_norm(case: Case, generator: torch.Generator) -> Example:
    tokens, hidden, dtype = int(case["tokens"]), int(case["hidden"]), str(case["dtype"])
    leaves, extra = _leaves(case)
    inputs = {
        "x": random_tensor((tokens, leaves * hidden), "float32", generator),
        "weight_scale": torch.rand((hidden,), generator=generator) + 0.5,
        "x_scale": torch.rand((1,), generator=generator) + 0.5,
        "residual": random_tensor((tokens, hidden), dtype, generator),
        "norm_weight": random_tensor((hidden,), dtype, generator),
    }
    if case["bias"]:
        inputs["bias"] = random_tensor((hidden,), dtype, generator)
    if case["scaling"] == "static":
        inputs["scale"] = torch.rand((1,), generator=generator) / 64 + 1 / 64
    out_dtype = FP8 if case["scaling"] == "static" else dtype
    made = {
        "out": empty((tokens, hidden), out_dtype),
        "residual_out": empty((tokens, hidden), dtype),
    }
    attributes = {"ranks": 1, "epsilon": 1e-5, **extra}
    call = OpCall("all_reduce_norm", "sum", inputs, made, attributes)
    return Example(call, plain_step(tokens), no_cache())


def _all_gather(case: Case, generator: torch.Generator) -> Example:
    tokens, own, columns = (int(case[k]) for k in ("tokens", "own", "columns"))
    dtype = str(case["dtype"])
    inputs = {"x": random_tensor((tokens, own), dtype, generator)}
    made = {"out": empty((tokens, columns), dtype)}
    call = OpCall("all_gather", "gather", inputs, made, {"ranks": 1})
    return Example(call, plain_step(tokens), no_cache())


RANK_MAKERS: Mapping[str, Callable[[Case, torch.Generator], Example]] = {
    "all_reduce": _all_reduce,
    "all_reduce_norm": _all_reduce_norm,
    "all_gather": _all_gather,
}
