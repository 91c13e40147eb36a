"""CUDA kernels of the packed products: `decode.cu` for few tokens, `prefill.cu` for many, with
one before it that makes the numbers of weights that are codes.

A product with a norm is one launch where its variant normalizes, else two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.decode import DecodeVariant, decode_launch, decode_spec
from llmctl.plugins.ops.packed_linear.norm import norm_call, product_call
from llmctl.plugins.ops.packed_linear.prefill import prefill_kernels, prefill_launches
from llmctl.plugins.ops.packed_linear.tactics import MANY, parse_tactic, tactic_of
from llmctl.plugins.ops.rms_norm import kernel as rms_norm

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

OWN_ROLES = frozenset(
    {"weight", "weight_scale", "x_scale", "bias", "scale", "k_scale", "v_scale", "norm_weight"}
)


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The binaries of every entry of the tactic that a step can reach."""
    has_norm = "norm_weight" in call.inputs
    plain = product_call(call) if has_norm else call
    specs = rms_norm.kernels(norm_call(call), limits) if has_norm else []
    reached = 0
    for most, variant in parse_tactic(tactic_of(call)):
        if reached >= call.inputs["x"].shape[0]:
            break
        if variant == MANY:
            specs += prefill_kernels(plain, limits)
        else:
            parsed = DecodeVariant.parse(variant, form_of(call))
            specs.append(decode_spec(call if parsed.normalizes else plain, parsed, limits))
        reached = most
    return specs


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """The launches of the entry for the step's tokens."""
    tokens = env.count(shape)
    variant = next(name for most, name in parse_tactic(tactic_of(call)) if tokens <= most)
    form = form_of(call)
    parsed = None if variant == MANY else DecodeVariant.parse(variant, form)
    if parsed is not None and parsed.normalizes:
        return [decode_launch(call, env, tokens, parsed)]
    before: list[Launch] = []
    if "norm_weight" in call.inputs:
        before = rms_norm.launches(norm_call(call), env, shape)
        call = product_call(call)
    if parsed is None:
        return [*before, *prefill_launches(call, env, tokens)]
    return [*before, decode_launch(call, env, tokens, parsed)]
