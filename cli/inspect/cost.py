"""What the operators of one step read and write, and their predicted time.

A step has `tokens` tokens of one sequence (1: plain decoding; draft_len + 1: a verification) whose
KV cache has `context_len` tokens. At these sizes time is dominated by reading: an operator's
prediction is its bytes divided by the bandwidth that a whole step reaches (see cli/gpus.py), so the
operators' times add up to the step's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.builder.container import DTYPES
from llmctl.builder.engine_format import BASE, TOP_K, KvCacheSpec, Plan, PlanOp, PlanTensor
from llmctl.cli.rank_speed import Meeting, head_meeting, listing_meeting

# Weights of which a step reads one row a token: the embedding table and the rotary table.
_LOOKED_UP = {("embedding", "weight"), ("rope_kv_write", "rotary")}
_LOOKED_UP |= {("packed_linear_rope_kv", "rotary"), ("embedding_norm", "weight")}
_WRITES_KV = ("rope_kv_write", "packed_linear_rope_kv")


@dataclass(frozen=True, slots=True)
class Step:
    """The step that is predicted."""

    tokens: int = 1
    context_len: int = 1000

    @property
    def sizes(self) -> dict[str, int]:
        """What the symbolic dimensions of a plan stand for; every token gets logits."""
        return {"tokens": self.tokens, "rows": self.tokens, "requests": 1, "beams": 1}


DECODE = Step()


@dataclass(frozen=True, slots=True)
class OpBytes:
    """Bytes that one operator moves in one step."""

    weights: int  # read
    activations: int  # read
    kv_cache: int  # read
    written: int  # activations and KV cache

    @property
    def read(self) -> int:
        """Everything that is read."""
        return self.weights + self.activations + self.kv_cache


def op_bytes(
    op: PlanOp, tensors: Mapping[str, PlanTensor], cache: KvCacheSpec, step: Step
) -> OpBytes:
    """The bytes of one operator."""
    sizes = step.sizes
    weights = activations = kv_cache = 0
    for role, name in op.inputs.items():
        if name not in tensors:  # a TensorRT piece binds arrays of the step, too
            continue
        tensor = tensors[name]
        is_looked_up = "token_ids" in op.inputs and role.endswith("embed_tokens.weight")
        if (op.op, role) in _LOOKED_UP or is_looked_up:
            weights += step.tokens * _num_bytes(tensor, sizes) // int(tensor.shape[0])
        elif tensor.kind == "weight":
            weights += _num_bytes(tensor, sizes)
        else:
            activations += _num_bytes(tensor, sizes)
    written = sum(_num_bytes(tensors[name], sizes) for name in op.outputs.values())
    token_bytes = 2 * cache.num_kv_heads * cache.head_size * DTYPES[cache.dtype][1]
    if op.op == "paged_attention":
        window = int(op.attributes.get("window", 0)) or step.context_len
        kv_cache = token_bytes * min(step.context_len, window)
    if op.op in _WRITES_KV:
        written += token_bytes * step.tokens
    return OpBytes(weights, activations, kv_cache, written)


def step_bytes(plan: Plan, step: Step, graph: str = BASE) -> int:
    """Bytes that all operators of a step, or of a draft head's, read."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    found = plan.graphs[graph]
    cache = plan.caches[found.cache]
    return sum(op_bytes(op, tensors, cache, step).read for op in found.ops)


def meetings(plan: Plan, step: Step, graph: str = BASE) -> list[Meeting]:
    """Where the ranks of the step's engine meet, over logits last; none on one rank. All heads of a
    graph list what is likely in theirs at once."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    over = [op for op in plan.graphs[graph].ops if int(op.attributes.get("ranks", 1)) > 1]
    logits = [op for op in over if op.op == "all_gather" and "to_all" not in op.attributes]
    found = [_meeting(op, tensors[op.inputs["x"]], step) for op in over if op not in logits]
    if not logits:
        return found
    rows, share = tensors[logits[0].inputs["x"]].shape
    count = step.sizes[str(rows)] * len(logits)
    if graph == BASE:
        return [*found, head_meeting(int(share), count)]
    listed = plan.max_num_beams // plan.max_num_requests or TOP_K
    return [*found, listing_meeting(int(share), count, listed)]


def _meeting(op: PlanOp, x: PlanTensor, step: Step) -> Meeting:
    num_bytes = _num_bytes(x, step.sizes) // int(op.attributes.get("leaves", 1))
    return Meeting(num_bytes, has_norm=op.op == "all_reduce_norm")


def fused(op: PlanOp) -> list[str]:
    """The operations of the model that an operator does at once, in order."""
    module = op.name.rpartition(".")[2]
    merged = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }.get(module, [module])
    quantize = ["quantize"] if "scale" in op.inputs or "out_scale" in op.outputs else []
    norms = ["q_norm", "k_norm"] if "q_norm" in op.inputs else []
    add = ["add"] if "residual" in op.inputs else []
    if op.op == "all_reduce_norm":
        return ["all_reduce", *add, "rms_norm", *quantize]
    if "norm_weight" in op.inputs:
        merged = [*add, "rms_norm", *(["quantize"] if "x_scale" in op.inputs else []), *merged]
    return {
        "linear": merged,
        "packed_linear": merged,
        "packed_linear_swiglu": [*merged, "silu", "mul", *quantize],
        "packed_linear_rope_kv": [*merged, "rope", "kv_write"],
        "rope_kv_write": [*norms, "rope", "kv_write"],
        "swiglu": ["silu", "mul", *quantize],
        "silu": ["silu", *add],
        "rms_norm": [*add, "rms_norm", *quantize],
        "embedding_norm": ["embedding", "rms_norm", *quantize],
        "paged_attention": ["attention", *(["quantize"] if "out_scale" in op.inputs else [])],
    }.get(op.op, [op.op])


def _num_bytes(tensor: PlanTensor, sizes: Mapping[str, int]) -> int:
    dims = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
    return math.prod(dims) * DTYPES[tensor.dtype][1]
