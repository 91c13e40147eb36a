"""Arguments of launches: what every attention kernel takes, and the room that they share."""

from __future__ import annotations

import math

import torch

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention.batch.batch import is_long
from llmctl.plugins.ops.paged_attention.few_fp8.few_fp8 import few_fp8_numbers
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units
from llmctl.plugins.ops.paged_attention.triton.specs import ROWS

_PARTIAL_BYTES = 64 << 20  # partial results of split requests, at least a whole tree's; what does
# not fit is not split
_SEVERAL_BYTES = 256 << 20  # at most, of chains or trees of several requests with long contexts


def partials(call: OpCall, env: LaunchEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the units of split requests, and counters for each group of splits."""
    size, limits = int(call.attributes["head_size"]), env.limits
    groups = limits.max_batch_size * int(call.attributes["num_kv_heads"])
    name = f"paged_attention.d{size}"
    return (
        env.scratch(f"{name}.partial", (_partial_numbers(call, limits),), torch.float32),
        env.scratch(f"{name}.counters", (max(32 * 8 * limits.num_sms, groups),), torch.int32),
    )


def _partial_numbers(call: OpCall, limits: StepLimits) -> int:
    """An engine that verifies drafts has room for its longest chain or tree with its longest
    context and, where contexts are long, for as many as multiprocessors share (long.cu)."""
    if fp8_tokens(call.attributes) is Fp8Tokens.ALL:
        return few_fp8_numbers(call, limits)
    size, heads = int(call.attributes["head_size"]), int(call.attributes["num_heads"])
    a_row = count_units(limits.max_seq_len) * (size + 2)
    room = _PARTIAL_BYTES // 4
    if limits.takes_trees:
        longest = (limits.max_draft_len + 1) * heads * a_row
        sharing = limits.num_sms // (2 * int(call.attributes["num_kv_heads"]))  # requests
        several = min(limits.max_batch_size, sharing) if is_long(limits, limits.max_seq_len) else 1
        room = max(room, longest, min(several * longest, _SEVERAL_BYTES // 4))
    return min(limits.num_sms * ROWS * a_row, room)


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
