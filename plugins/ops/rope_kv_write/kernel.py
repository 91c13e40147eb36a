"""Rotary embedding and KV write on a GPU: which binaries there are, how a step launches them."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.quantize.kernel import power_of_two

_BLOCK_HEADS = 8  # heads of a thread block
_OPTIONAL = ("q_norm", "k_norm", "k_scale", "v_scale")


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary for all layers."""
    return [_spec(call, limits)]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Rotate the step's queries and keys; store keys and values in their slots."""
    if shape.num_tokens == 0:
        return []
    spec = _spec(call, env.limits)
    qkv, rotary = call.inputs["qkv"], call.inputs["rotary"]
    all_heads = qkv.shape[1] // int(call.attributes["head_size"])
    # An absent role is not read: any tensor of its type can be passed.
    arguments = (
        qkv,
        rotary,
        call.inputs.get("q_norm", qkv),
        call.inputs.get("k_norm", qkv),
        call.inputs.get("k_scale", rotary),
        call.inputs.get("v_scale", rotary),
        env.step.position_ids,
        env.step.slot_mapping,
        call.outputs["q"],
        env.kv_cache,
        rotary.shape[0],
        env.kv_cache.shape[1],
        int(call.attributes["layer"]),
        float(call.attributes["epsilon"]),
    )
    return [Launch(spec, (shape.num_tokens, -(-all_heads // _BLOCK_HEADS), 1), arguments)]


def _spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    dtype = call.inputs["qkv"].dtype
    kind = pointer(dtype)
    num_heads, num_kv_heads, head_size = (
        int(call.attributes[key]) for key in ("num_heads", "num_kv_heads", "head_size")
    )
    present = [role for role in _OPTIONAL if role in call.inputs]
    size = f"h{num_heads}.{num_kv_heads}.d{head_size}.t{limits.tokens_per_block}"
    types = f"{short_name(dtype)}.{short_name(limits.kv_dtype)}"
    return KernelSpec(
        name=".".join(["rope_kv_write", types, size, *present]),
        source="llmctl.plugins.ops.rope_kv_write.triton_kernel:rope_kv_write",
        arguments=(
            *(kind, "*fp32", kind, kind, "*fp32", "*fp32", "*i32", "*i32"),
            *(kind, pointer(limits.kv_dtype), "i32", "i32", "i32", "fp32"),
        ),
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_SIZE": head_size,
            "TOKENS_PER_BLOCK": limits.tokens_per_block,
            "BLOCK_HEADS": _BLOCK_HEADS,
            "BLOCK_HALF": power_of_two(head_size // 2),
            **{f"HAS_{role.upper()}": role in present for role in _OPTIONAL},
            "PDL": True,
        },
    )
