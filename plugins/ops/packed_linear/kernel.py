"""CUDA kernels of the packed products: `decode.cu` for few tokens, `prefill.cu` for many, with
one before it that makes the numbers of weights that are codes.

A product with a norm is one launch where its variant normalizes, else two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.ops.all_reduce.peers import hops_of
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.decode import DecodeVariant, decode_launch, decode_spec
from llmctl.plugins.ops.packed_linear.forms import few_tokens
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
    pushed, call = call, kept_call(call)
    has_norm = "norm_weight" in call.inputs
    plain = product_call(call) if has_norm else call
    is_few = "pushed_to" in pushed.attributes  # as long as entries are for few tokens
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
            if is_few:
                specs.append(decode_spec(pushed, parsed, limits))
        is_few = is_few and variant != MANY
        reached = most
    return specs


def kept_call(call: OpCall) -> OpCall:
    """The same product, which hands nothing on."""
    attributes = {key: value for key, value in call.attributes.items() if key != "pushed_to"}
    return replace(call, attributes=attributes)


def pushes(call: OpCall, env: LaunchEnv, tokens: int) -> bool:
    """Whether the product hands the sums of so many tokens to the other ranks: what takes them
    decides alike (all_reduce_norm)."""
    if env.peers is None or "pushed_to" not in call.attributes:
        return False
    hops = hops_of(env.peers.num_ranks, tokens, call.outputs["out"].shape[1])
    return hops == 1 and tokens <= few_tokens(tactic_of(call))


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """The launches of the entry for the step's tokens."""
    tokens = env.count(shape)
    if not pushes(call, env, tokens):
        call = kept_call(call)
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
