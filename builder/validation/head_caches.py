"""The KV caches of heads that attend: their sizes, and whether the operators keep to them.

Kernels find a slot from the layer, the heads and the block table alone, so an operator of another
layer or other heads than its cache has would read and write outside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import BASE, KvCacheSpec, Plan, PlanOp, PlanTensor
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.strict_json import MOST
from llmctl.errors import CorruptEngine
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

_WRITES = ("rope_kv_write", "packed_linear_rope_kv")
_MOST_LAYERS = 100
_MOST_SCORES = 2**62


def check_head_caches(config: EngineConfig, plan: Plan, tensors: Mapping[str, PlanTensor]) -> None:
    """Raises CorruptEngine. `check_operators` has passed.

    Each cache is some head's. In each head that has one, every layer is written once and then
    attended once, with the cache's own sizes and a rotary table of all positions.
    """
    dtype, length = config.pretrained_config["dtype"], config.build_config["max_seq_len"]
    used = {graph.cache for graph in plan.graphs.values()}
    if plan.graphs[BASE].cache or used - {"", *plan.head_caches}:
        raise wrong(
            f"graphs have the KV caches {sorted(used)}; {sorted(plan.head_caches)} are there"
        )
    for name, cache in plan.head_caches.items():
        if not name or name not in used:
            raise wrong(f"KV cache {name!r} is of no head")
        _check_sizes(name, cache, plan, dtype, length)
    for name, head in plan.heads.items():
        if head.cache:
            _check_operators(name, plan, tensors, length)


def _check_sizes(name: str, cache: KvCacheSpec, plan: Plan, dtype: str, length: int) -> None:
    block = plan.kv_cache.tokens_per_block
    if cache.tokens_per_block != block:
        raise wrong(
            f"KV cache {name!r} has blocks of {cache.tokens_per_block} tokens; the blocks of the "
            f"base graph, of {block}, are wanted"
        )
    if cache.dtype != dtype:
        raise wrong(f"KV cache {name!r} is {cache.dtype}; the model's dtype, {dtype}, is wanted")
    is_sound = 1 <= cache.num_layers <= _MOST_LAYERS and len(cache.windows) == cache.num_layers
    if not is_sound or not (1 <= cache.num_kv_heads <= MOST and 1 <= cache.head_size <= MOST):
        raise wrong(
            f"KV cache {name!r} has {cache.num_layers} layers of {cache.num_kv_heads} heads of "
            f"{cache.head_size}, and {len(cache.windows)} windows"
        )
    if any(not 0 <= window < length for window in cache.windows):
        raise wrong(f"KV cache {name!r} has windows {cache.windows} for {length} tokens")


def _check_operators(name: str, plan: Plan, tensors: Mapping[str, PlanTensor], length: int) -> None:
    head = plan.heads[name]
    cache = plan.head_caches[head.cache]
    written: list[int] = []
    attended: list[int] = []
    for op in head.ops:
        if "layer" not in op.attributes:
            continue
        layer = int(op.attributes["layer"])
        if op.op in _WRITES:
            rotary = list(tensors[op.inputs["rotary"]].shape)
            if rotary != [length, cache.head_size]:
                raise _refused(name, op, "rotary", rotary, [length, cache.head_size])
            written.append(layer)
        else:
            if layer not in written:
                raise _refused(name, op, "layer", layer, "one that is written before")
            attended.append(layer)
        _check_attributes(name, op, cache)
        scores = plan.max_num_tokens * length * int(op.attributes["num_heads"]) * cache.head_size
        if scores > _MOST_SCORES:
            raise wrong(f"attention of {op.name!r} over {length} tokens leaves 64 bits")
        if "k_scale" in op.inputs:
            raise wrong(f"operator {op.name!r} scales keys, and its KV cache is not quantized")
    layers = list(range(cache.num_layers))
    if written != layers or attended != layers:
        raise wrong(
            f"head {name!r} writes layers {written} and attends to {attended}; its KV cache has "
            f"{cache.num_layers}"
        )


def _check_attributes(name: str, op: PlanOp, cache: KvCacheSpec) -> None:
    wanted: dict[str, Any] = {"num_kv_heads": cache.num_kv_heads, "head_size": cache.head_size}
    if op.op not in _WRITES:
        layer = int(op.attributes["layer"])
        wanted["window"] = cache.windows[layer] if 0 <= layer < cache.num_layers else None
        wanted["softmax_scale"] = float(cache.head_size) ** -0.5
    for key, value in wanted.items():
        if op.attributes[key] != value:
            raise _refused(name, op, key, op.attributes[key], value)
    if op.attributes.get("sink_tokens", 0):
        raise _refused(name, op, "sink_tokens", op.attributes["sink_tokens"], 0)
    if fp8_tokens(op.attributes) is not Fp8Tokens.NONE:
        raise _refused(name, op, "FP8 products", True, False)


def _refused(name: str, op: PlanOp, what: str, found: object, wanted: object) -> CorruptEngine:
    return wrong(f"operator {op.name!r} of head {name!r} has {what} {found}; {wanted} is wanted")
