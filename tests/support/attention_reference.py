"""How near attention is to its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmctl.plugins.core.examples import Example
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.spec import SPEC
from support.attention import Part, World


def weight_rounding(example: Example) -> torch.Tensor:
    """How far rounding the weights to the values' type may move each output element, in float32:
    half an ulp of every product."""
    largest = example.clone()
    inputs, values = largest.call.inputs, largest.kv_cache[:, :, 1]
    values.copy_(values.float().abs().to(values.dtype))
    scale = inputs.get("out_scale")
    unquantized = {role: tensor for role, tensor in inputs.items() if role != "out_scale"}
    out = torch.empty_like(inputs["q"])
    reference(unquantized, {"out": out}, largest.call.attributes, largest.step, largest.kv_cache)
    is_bfloat16 = example.kv_cache.dtype == torch.bfloat16
    bound = out.float() * (2.0**-8 if is_bfloat16 else 2.0**-10)
    return bound if scale is None else bound / scale


def is_near_reference(world: World, parts: Sequence[Part], found: torch.Tensor) -> bool:
    """Whether rows of these parts, one after another, are what the reference computes, but for the
    type's rounding and that of weights. NaN is not."""
    step, call = world.step(parts), world.call(parts)
    slack = weight_rounding(Example(call, step, world.cache))
    reference(call.inputs, call.outputs, call.attributes, step, world.cache)
    wanted = call.outputs["out"].float()
    rounding = SPEC.tolerance[str(found.dtype).removeprefix("torch.")]
    allowed = slack + rounding.atol + rounding.rtol * wanted.abs()
    return bool(((found.float() - wanted).abs() <= allowed).all())
