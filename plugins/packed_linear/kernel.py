"""CUDA kernels of the packed products: `decode.cu` for few tokens, `prefill.cu` for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.cuda.kernel import KernelSpec, Launch, LaunchEnv, StepLimits, StepShape
from llmctl.plugins.packed_linear.decode import DecodeVariant, decode_launch, decode_spec
from llmctl.plugins.packed_linear.prefill import prefill_kernels, prefill_launch
from llmctl.plugins.packed_linear.tactics import MANY, parse_tactic, tactic_of

if TYPE_CHECKING:
    from llmctl.plugins.program import OpCall


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The binaries of every entry of the tactic that a step can reach."""
    specs: list[KernelSpec] = []
    reached = 0
    for most, variant in parse_tactic(tactic_of(call)):
        if reached >= call.inputs["x"].shape[0]:
            break
        if variant == MANY:
            specs += prefill_kernels(call, limits)
        else:
            specs.append(decode_spec(call, DecodeVariant.parse(variant), limits))
        reached = most
    return specs


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """One launch, of the entry for the step's tokens."""
    tokens = env.count(shape)
    variant = next(name for most, name in parse_tactic(tactic_of(call)) if tokens <= most)
    if variant == MANY:
        return [prefill_launch(call, env, tokens)]
    return [decode_launch(call, env, tokens, DecodeVariant.parse(variant))]
