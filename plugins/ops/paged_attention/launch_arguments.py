"""Arguments that several attention kernels share."""

from __future__ import annotations

import math

import torch

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention.tiles import count_units
from llmctl.plugins.ops.paged_attention.triton_specs import ROWS

_PARTIAL_BYTES = 64 << 20  # partial results of split requests, at least a whole tree's; what does
# not fit is not split


def partials(call: OpCall, env: LaunchEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the units of split requests, and counters for each group of splits."""
    size, limits = int(call.attributes["head_size"]), env.limits
    groups = limits.max_batch_size * int(call.attributes["num_kv_heads"])
    a_row = count_units(limits.max_seq_len) * (size + 2)
    wanted = limits.num_sms * ROWS * a_row
    largest_tree = (limits.max_draft_len + 1) * int(call.attributes["num_heads"]) * a_row
    room = max(_PARTIAL_BYTES // 4, largest_tree if limits.takes_trees else 0)
    name = f"paged_attention.d{size}"
    return (
        env.scratch(f"{name}.partial", (min(wanted, room),), torch.float32),
        env.scratch(f"{name}.counters", (max(32 * limits.num_sms, groups),), torch.int32),
    )


def own_tensors(call: OpCall, env: LaunchEnv) -> tuple[torch.Tensor, ...]:
    """What every kernel reads and writes: the first arguments of each launch. A scale that is
    absent is not touched."""
    step, layer = env.step, env.kv_cache[int(call.attributes["layer"])]
    unused = env.scratch("paged_attention.no_scale", (4,), torch.float32)
    return (
        call.inputs["q"],
        call.inputs.get("k_scale", unused),
        call.inputs.get("v_scale", unused),
        call.inputs.get("out_scale", unused),
        call.outputs["out"],
        layer,
        step.position_ids,
        step.cu_q,
        step.kv_len,
        step.block_tables,
    )


def logit_scale(call: OpCall) -> float:
    """By which kernels multiply a query's product with a key, for a softmax of powers of two."""
    return float(call.attributes["softmax_scale"]) * math.log2(math.e)
