"""Paged attention on a GPU: which binaries there are, and how a step launches them.

Kernels for generation and verification (up to SHORT tokens per request, or a whole tree of tokens)
split the keys over thread blocks; those for longer requests, the context chunks, do not. A step
that may have both launches both kernels, and each skips the other's requests: the result of a row
is the same in either. Where few thread blocks have to be fast together, verification.cu or
generation.cu processes the short requests; where many requests have one or two tokens each, or
contexts are long, batch.cu; where contexts are long and requests have more tokens, long.cu or, for
some batches of chains, long_batch.cu; where many have more, tree.cu. chunk.cu processes context
chunks, but for tokens with FP8 products, which are chunk_fp8.cu's. In steps with trees one kernel
that supports paths serves the short (long, tree, triton/tree.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention.batch.batch import (
    FEW_GROUPS,
    MAX_ROWS,
    batch_launch,
    batch_specs,
    covers_batch,
    is_long,
    most_tokens,
)
from llmctl.plugins.ops.paged_attention.chunk.chunk import (
    chunk_launches,
    chunk_specs,
    covers_chunks,
)
from llmctl.plugins.ops.paged_attention.chunk_fp8.chunk_fp8 import (
    fp8_launches,
    fp8_specs,
    has_fp8_context,
)
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP
from llmctl.plugins.ops.paged_attention.generation.generation import (
    choose_cut,
    covers,
    generation_launch,
    generation_specs,
)
from llmctl.plugins.ops.paged_attention.long.long import cut_of, long_launch, long_specs
from llmctl.plugins.ops.paged_attention.long_batch.long_batch import (
    long_batch_launch,
    long_batch_specs,
)
from llmctl.plugins.ops.paged_attention.shared.launch_arguments import (
    logit_scale,
    own_tensors,
    partials,
)
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT, group_size
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units
from llmctl.plugins.ops.paged_attention.tree import tree
from llmctl.plugins.ops.paged_attention.triton.specs import (
    ROWS,
    context_rows,
    context_spec,
    split_spec,
    window_arguments,
)
from llmctl.plugins.ops.paged_attention.verification.verification import (
    choose_variant,
    verification_launch,
    verification_specs,
)

HEAD_SIZES = (64, 80, 96, 128)
OWN_ROLES = frozenset({"q", "k_scale", "v_scale", "out_scale", "out"})
# What a run asks for comes with sink_tokens; those binaries take both numbers as arguments.
_ANY_WINDOW: dict[str, int] = {"window": 1, "sink_tokens": 0}


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The kernels for few tokens a request and those for chunks: what any step may need."""
    size, group = int(call.attributes["head_size"]), group_size(call)
    if size not in HEAD_SIZES or group > ROWS:
        raise Unsupported(
            f"{call.name}: no CUDA attention kernel for head size {size} with {group} query heads "
            f"per KV head; wanted head size {', '.join(map(str, HEAD_SIZES))} and at most {ROWS}",
            fix="build with --backend cpu",
        )
    by_warp = (batch_specs, verification_specs) if covers_batch(call, limits) else ()
    asked = replace(call, attributes={**call.attributes, **_ANY_WINDOW})
    return [
        *(make(each, limits) for each in (call, asked) for make in (split_spec, context_spec)),
        *([split_spec(call, limits, has_trees=True)] if limits.takes_trees else []),
        *(generation_specs(call, limits) if covers(call, limits) else []),
        *(spec for make in by_warp for spec in make(call, limits)),
        *(chunk_specs(call, limits) if covers_chunks(call, limits) else []),
        *fp8_specs(call, limits),
        *long_specs(call, limits),
        *long_batch_specs(call, limits),
        *tree.tree_specs(call, limits),
    ]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Attend for every token of the step's requests; the cache already holds their keys."""
    if shape.num_tokens == 0 or shape.num_requests == 0:
        return []
    if shape.max_tree_len:
        short = max(SHORT, shape.max_tree_len)  # longer than a tree: a context chunk
        trees = _trees(call, env, shape, short)
        is_all = shape.max_query_len <= short
        return [trees] if is_all else [*_context(call, env, shape, short + 1), trees]
    short = SHORT
    if shape.max_query_len <= short:
        return [_generation(call, env, shape, short)]
    if shape.num_requests == 1:
        return _context(call, env, shape, 1)
    # Beside chunks most requests have one token; the context kernel takes who has a few more.
    if (batch := _batch(call, env, shape, most_tokens(call))) is not None:
        return [*_context(call, env, shape, most_tokens(call) + 1), batch]
    return [*_context(call, env, shape, short + 1), _generation(call, env, shape, short)]


def _generation(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    size = int(call.attributes["head_size"])
    most = min(shape.max_query_len, short)
    if is_long(env.limits, shape.max_kv_len):
        long = _batch(call, env, shape, most, fewest=1) or _long(call, env, shape, short)
        if long is not None:
            return long
    # The ring of a small model's next product fills beside generation.cu, which needs less room.
    ways = (_few, _verification) if size == 64 else (_verification, _few)
    for way in ways:
        if (special := way(call, env, shape, short)) is not None:
            return special
    own = own_tensors(call, env), logit_scale(call)
    many = tree.fast_chain_launch(call, env, shape, *own, short) if env.use_pdl else None
    batch = many or _batch(call, env, shape, shape.max_query_len)
    return batch or _split(call, env, shape, short)


def _split(
    call: OpCall, env: LaunchEnv, shape: StepShape, short: int, has_trees: bool = False
) -> Launch:
    limits = env.limits
    heads, size = int(call.attributes["num_kv_heads"]), int(call.attributes["head_size"])
    most = min(shape.max_query_len, short)
    num_blocks = -(-most // (ROWS // group_size(call)))
    block_tokens = -(-most // num_blocks)
    num_rows = block_tokens * group_size(call)
    groups = shape.num_requests * heads * num_blocks
    splits, entries = 1, 1
    partial, counters = partials(call, env)
    if groups <= limits.num_sms:
        # Splits wait for each other, so all must run at once: two thread blocks fit an SM.
        splits = min(2 * limits.num_sms // groups, count_units(shape.max_kv_len))
        entries = partial.numel() // (groups * num_rows * (size + 2))
    states = partial[groups * entries * num_rows * size :] if splits > 1 else partial
    step = env.step
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *own_tensors(call, env),
        step.tree_start,
        step.tree_root,
        step.paths,
        partial,
        states,
        counters,
        logit_scale(call),
        step.block_tables.stride(0),
        step.paths.stride(0),
        block_tokens,
        entries,
        short,
        *window_arguments(call, has_trees),
    )
    grid = (splits, heads * num_blocks, shape.num_requests)
    return Launch(split_spec(call, limits, has_trees), grid, arguments)


def _verification(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """verification.cu's launch; None as in `_few`."""
    if not env.use_pdl or not covers_batch(call, env.limits):
        return None
    requests, most = shape.num_requests, min(shape.max_query_len, short)
    variant = choose_variant(call, env.limits, requests, most, shape.max_kv_len)
    if variant is None:
        return None
    tensors, scale = own_tensors(call, env), logit_scale(call)
    return verification_launch(call, env, variant, requests, most, tensors, scale, short)


def _trees(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    """Requests of up to `short` tokens, chains and trees."""
    if (long := _long(call, env, shape, short, has_trees=True)) is not None:
        return long
    own = own_tensors(call, env), logit_scale(call)
    fast = tree.fast_tree_launch(call, env, shape, *own, short) if env.use_pdl else None
    return fast or _split(call, env, shape, short, has_trees=True)


def _long(
    call: OpCall, env: LaunchEnv, shape: StepShape, short: int, has_trees: bool = False
) -> Launch | None:
    """The launch of long.cu or long_batch.cu; None as in `_few`."""
    if not env.use_pdl:
        return None
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    found = long_launch(call, env, shape, *own, short, has_trees=has_trees)
    if found is None or has_trees:
        return found
    us = cut_of(call, env.limits, shape, short, own[1], has_trees=False).us
    return long_batch_launch(call, env, shape, *own, short, within_us=us) or found


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
        own_tensors(call, env),
        partials(call, env),
        logit_scale(call),
        short,
    )


def _batch(
    call: OpCall, env: LaunchEnv, shape: StepShape, max_tokens: int, fewest: int = FEW_GROUPS + 1
) -> Launch | None:
    """batch.cu's launch for requests of so many tokens; None as in `_few`."""
    groups = shape.num_requests * int(call.attributes["num_kv_heads"])
    if not env.use_pdl or not covers_batch(call, env.limits) or groups < fewest:
        return None
    if max_tokens * group_size(call) > MAX_ROWS:
        return None
    return batch_launch(
        call,
        env,
        shape.num_requests,
        max_tokens,
        shape.max_kv_len,
        own_tensors(call, env),
        partials(call, env),
        logit_scale(call),
    )


def _context(call: OpCall, env: LaunchEnv, shape: StepShape, min_tokens: int) -> list[Launch]:
    has_fp8 = has_fp8_context(call)
    if has_fp8 or (env.use_pdl and covers_chunks(call, env.limits)):
        own = own_tensors(call, env), partials(call, env)[1], logit_scale(call), min_tokens
        has_groups = has_fp8 and shape.max_query_len >= GROUP
        before = fp8_launches(call, env, shape, *own) if has_groups else []
        return [*before, *chunk_launches(call, env, shape, *own)]
    heads = int(call.attributes["num_kv_heads"])
    tokens = context_rows(call) // group_size(call)
    grid = (heads, shape.num_tokens // tokens + shape.num_requests, 1)
    arguments: tuple[torch.Tensor | int | float, ...] = (
        *own_tensors(call, env),
        logit_scale(call),
        env.step.block_tables.stride(0),
        shape.num_requests,
        min_tokens,
        *window_arguments(call),
    )
    return [Launch(context_spec(call, env.limits), grid, arguments)]
