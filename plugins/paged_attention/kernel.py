"""Paged attention on a GPU: which binaries there are, and how a step launches them.

Generation and verification (up to SHORT tokens a request, or a whole token tree) split the keys
over thread blocks; longer requests, the context chunks, do not. A step that may hold both launches
both kernels, and each passes over the other's requests: what a row gets is the same in either.
Where few thread blocks have to be fast together, generation.cu takes the short requests.
"""

from __future__ import annotations

import math

import torch

from llmctl.errors import Unsupported
from llmctl.plugins.cuda.dtypes import pointer, short_name
from llmctl.plugins.cuda.kernel import (
    Constant,
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.paged_attention.generation import (
    choose_cut,
    covers,
    generation_launch,
    generation_specs,
)
from llmctl.plugins.paged_attention.tiles import count_units
from llmctl.plugins.program import OpCall
from llmctl.plugins.spec import FP8

HEAD_SIZES = (64, 80, 96, 128)
SHORT = 17  # tokens: verification of 16 drafts
_ROWS = 64  # generation: rows of a thread block, one tensor-core instruction high
_MERGED_ROWS = 4  # rows that one pass of a merge takes
_PARTIAL_BYTES = 64 << 20  # partial results of split requests; what does not fit is not split
_MIN_REQUESTS = 64  # context: with fewer the compiler takes more registers than there are
# What a run asks for comes with sink_tokens; those binaries take both numbers as arguments.
_ANY_WINDOW: dict[str, int] = {"window": 1, "sink_tokens": 0}
_GENERATION = "llmctl.plugins.paged_attention.triton_generation"
_CONTEXT = "llmctl.plugins.paged_attention.triton_context"


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The generation kernels and the context kernel."""
    size, group = int(call.attributes["head_size"]), _group(call)
    if size not in HEAD_SIZES or group > _ROWS:
        raise Unsupported(
            f"{call.name}: no CUDA attention kernel for head size {size} with {group} query heads "
            f"per KV head; wanted head size {', '.join(map(str, HEAD_SIZES))} and at most {_ROWS}",
            fix="build with --backend cpu",
        )
    asked = OpCall(
        call.op, call.name, call.inputs, call.outputs, {**call.attributes, **_ANY_WINDOW}
    )
    return [
        *(
            make(each, limits)
            for each in (call, asked)
            for make in (_generation_spec, _context_spec)
        ),
        *(generation_specs(call, limits) if covers(call, limits) else []),
    ]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Attend for every token of the step's requests; the cache already holds their keys."""
    if shape.num_tokens == 0 or shape.num_requests == 0:
        return []
    short = _tree_tokens(call) or SHORT  # longer than a tree: a context chunk
    if shape.max_query_len <= short:
        return [_generation(call, env, shape, short)]
    if shape.num_requests == 1 and not _tree_tokens(call):
        return [_context(call, env, shape, 1)]
    return [_context(call, env, shape, short + 1), _generation(call, env, shape, short)]


def _generation(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    limits = env.limits
    few = _few(call, env, shape, short)
    if few is not None:
        return few
    heads, size = int(call.attributes["num_kv_heads"]), int(call.attributes["head_size"])
    most = min(shape.max_query_len, short)
    num_blocks = -(-most // (_ROWS // _group(call)))
    block_tokens = -(-most // num_blocks)
    num_rows = block_tokens * _group(call)
    groups = shape.num_requests * heads * num_blocks
    splits, entries = 1, 1
    partial, counters = _partials(call, env)
    if groups <= limits.num_sms:
        # Splits wait for each other, so all must run at once: two thread blocks fit an SM.
        splits = min(2 * limits.num_sms // groups, count_units(shape.max_kv_len))
        entries = partial.numel() // (groups * num_rows * (size + 2))
    states = partial[groups * entries * num_rows * size :] if splits > 1 else partial
    step = env.step
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *_tensors(call, env),
        call.inputs.get("tree_mask", step.cu_q),
        partial,
        states,
        counters,
        _logit_scale(call),
        step.block_tables.stride(0),
        block_tokens,
        entries,
        short,
        *_window(call),
    )
    grid = (splits, heads * num_blocks, shape.num_requests)
    return Launch(_generation_spec(call, limits), grid, arguments)


def _few(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """generation.cu's launch; None where it cannot serve, or not as well (or not interpreted)."""
    if not env.use_pdl or not covers(call, env.limits):
        return None
    most = min(shape.max_query_len, short)
    cut = choose_cut(call, shape.num_requests, most, shape.max_kv_len, env.limits.num_sms)
    if cut is None:
        return None
    return generation_launch(
        call,
        env,
        cut,
        shape.num_requests,
        _tensors(call, env),
        _partials(call, env),
        _logit_scale(call),
        short,
    )


def _context(call: OpCall, env: LaunchEnv, shape: StepShape, min_tokens: int) -> Launch:
    heads = int(call.attributes["num_kv_heads"])
    tokens = _context_rows(call) // _group(call)
    grid = (heads, shape.num_tokens // tokens + shape.num_requests, 1)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *_tensors(call, env),
        _logit_scale(call),
        env.step.block_tables.stride(0),
        shape.num_requests,
        min_tokens,
        *_window(call),
    )
    return Launch(_context_spec(call, env.limits), grid, arguments)


def _partials(call: OpCall, env: LaunchEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the units of split requests, and counters for each group of splits."""
    size, limits = int(call.attributes["head_size"]), env.limits
    wanted = limits.num_sms * count_units(limits.max_seq_len) * _ROWS * (size + 2)
    name = f"paged_attention.d{size}"
    return (
        env.scratch(f"{name}.partial", (min(wanted, _PARTIAL_BYTES // 4),), torch.float32),
        env.scratch(f"{name}.counters", (32 * limits.num_sms,), torch.int32),
    )


def _tensors(call: OpCall, env: LaunchEnv) -> tuple[torch.Tensor, ...]:
    """What both kernels read and write; a scale that is absent is not touched."""
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


def _context_rows(call: OpCall) -> int:
    """Rows of a context thread block: what measured best on an H200."""
    return 64 if int(call.attributes["head_size"]) == 64 else 128


def _group(call: OpCall) -> int:
    return int(call.attributes["num_heads"]) // int(call.attributes["num_kv_heads"])


def _window(call: OpCall) -> tuple[int, ...]:
    """The arguments REACH and SINKS; none where they are constants."""
    if "sink_tokens" not in call.attributes:
        return ()
    window, sinks = int(call.attributes["window"]), int(call.attributes["sink_tokens"])
    return (window - sinks, sinks)


def _tree_tokens(call: OpCall) -> int:
    """Tokens of the largest token tree; 0 without one."""
    return call.inputs["tree_mask"].shape[1] if "tree_mask" in call.inputs else 0


def _logit_scale(call: OpCall) -> float:
    return float(call.attributes["softmax_scale"]) * math.log2(math.e)


def _generation_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    words = _tree_tokens(call)
    names, constants = _variant(call, limits)
    return KernelSpec(
        name=".".join(["paged_attention.generation", *names] + [f"tree{words}"] * (words > 0)),
        source=f"{_GENERATION}:generation",
        arguments=(
            *_pointers(call, limits),
            *("*i32", "*fp32", "*fp32", "*i32"),
            "fp32",
            *["i32"] * (4 + len(_window(call))),
        ),
        constants={
            **constants,
            "ROWS": _ROWS,
            "MERGED_ROWS": _MERGED_ROWS,
            "AHEAD": _ahead(call, limits),
            "TREE_TOKENS": words,
        },
        num_warps=4,
        num_stages=1,
    )


def _ahead(call: OpCall, limits: StepLimits) -> int:
    """What the generation kernel loads ahead: as much as leaves no register in local memory."""
    if _tree_tokens(call) and _window(call):
        return 0
    if int(call.attributes["head_size"]) == 64:
        return 2
    return 1 if limits.kv_dtype == FP8 else 0


def _context_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    names, constants = _variant(call, limits)
    requests = max(_MIN_REQUESTS, 1 << (limits.max_batch_size - 1).bit_length())
    return KernelSpec(
        name=".".join(["paged_attention.context", *names, f"b{requests}"]),
        source=f"{_CONTEXT}:context",
        arguments=(*_pointers(call, limits), "fp32", *["i32"] * (3 + len(_window(call)))),
        constants={**constants, "ROWS": _context_rows(call), "MAX_REQUESTS": requests},
        num_warps=_context_rows(call) // 16,
        num_stages=2,
    )


def _pointers(call: OpCall, limits: StepLimits) -> tuple[str, ...]:
    """The types of `_tensors`."""
    return (
        pointer(call.inputs["q"].dtype),
        *["*fp32"] * 3,
        pointer(call.outputs["out"].dtype),
        pointer(limits.kv_dtype),
        *["*i32"] * 4,
    )


def _variant(call: OpCall, limits: StepLimits) -> tuple[list[str], dict[str, Constant]]:
    """What tells both kernels' binaries apart: the parts of a name, and the constants."""
    size, window = int(call.attributes["head_size"]), int(call.attributes["window"])
    is_asked = bool(_window(call))
    constants: dict[str, Constant] = {} if is_asked else {"REACH": window, "SINKS": 0}
    heads, group = int(call.attributes["num_kv_heads"]), _group(call)
    scaled = [role for role in ("k_scale", "v_scale", "out_scale") if role in call.inputs]
    names = [short_name(call.inputs["q"].dtype), f"kv_{short_name(limits.kv_dtype)}"]
    names += [f"h{heads}x{group}", f"d{size}", f"page{limits.tokens_per_block}", *scaled]
    names += ["windows"] if is_asked else [f"window{window}"] * (window > 0)
    return names, {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "WIDTH": 64 if size == 64 else 128,
        "TOKENS_PER_BLOCK": limits.tokens_per_block,
        **constants,
        "HAS_WINDOW": window > 0,
        "HAS_SINKS": is_asked,
        "K_SCALE": "k_scale" in scaled,
        "V_SCALE": "v_scale" in scaled,
        "STATIC": "out_scale" in scaled,
        "PDL": True,
    }
