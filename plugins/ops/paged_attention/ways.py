"""How each kernel launches for the short requests of a step: its launch, or None where it cannot
serve that step, or another kernel is known to do so faster (kernel.py says in which order they are
asked).

`short`: the most tokens of a request that is served; whoever has more is a context chunk.
"""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv, StepShape
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention.batch.batch import (
    FEW_GROUPS,
    MAX_ROWS,
    batch_launch,
    covers_batch,
    most_tokens,
)
from llmctl.plugins.ops.paged_attention.generation.generation import (
    choose_cut,
    covers,
    generation_launch,
)
from llmctl.plugins.ops.paged_attention.launch_arguments import (
    logit_scale,
    own_tensors,
    partials,
)
from llmctl.plugins.ops.paged_attention.long.long import cut_of, long_launch
from llmctl.plugins.ops.paged_attention.long_batch.long_batch import long_batch_launch
from llmctl.plugins.ops.paged_attention.shared.source_specs import group_size
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units
from llmctl.plugins.ops.paged_attention.tree import tree
from llmctl.plugins.ops.paged_attention.triton.specs import ROWS, split_spec, window_arguments
from llmctl.plugins.ops.paged_attention.verification.verification import (
    choose_variant,
    verification_launch,
)


def verification(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By verification.cu."""
    if not env.use_pdl or not covers_batch(call, env.limits):
        return None
    requests, most = shape.num_requests, min(shape.max_query_len, short)
    variant = choose_variant(call, env.limits, requests, most, shape.max_kv_len)
    if variant is None:
        return None
    tensors, scale = own_tensors(call, env), logit_scale(call)
    return verification_launch(call, env, variant, requests, most, tensors, scale, short)


def generation(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By generation.cu."""
    if not env.use_pdl or not covers(call, env.limits):
        return None
    most = min(shape.max_query_len, short)
    cut = choose_cut(call, shape.num_requests, most, shape.max_kv_len, env.limits.num_sms)
    if cut is None:
        return None
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    return generation_launch(call, env, cut, shape.num_requests, *own, short)


def tree_of_chains(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By tree.cu, without trees."""
    own = own_tensors(call, env), logit_scale(call)
    return tree.fast_chain_launch(call, env, shape, *own, short) if env.use_pdl else None


def batch(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By batch.cu, of many requests without context chunks."""
    return _batch(call, env, shape, shape.max_query_len)


def batch_beside_chunks(call: OpCall, env: LaunchEnv, shape: StepShape) -> Launch | None:
    """By batch.cu, for requests of up to `most_tokens`."""
    return _batch(call, env, shape, most_tokens(call))


def batch_of_any(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By batch.cu, of few requests, too: where contexts are long all its warps share them."""
    return _batch(call, env, shape, min(shape.max_query_len, short), fewest=1)


def _batch(
    call: OpCall, env: LaunchEnv, shape: StepShape, max_tokens: int, fewest: int = FEW_GROUPS + 1
) -> Launch | None:
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


def long_chains(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By long.cu or long_batch.cu, whichever takes less time."""
    if not env.use_pdl:
        return None
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    found = long_launch(call, env, shape, *own, short, has_trees=False)
    if found is None:
        return None
    us = cut_of(call, env.limits, shape, short, own[1], has_trees=False).us
    return long_batch_launch(call, env, shape, *own, short, within_us=us) or found


def long_trees(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch | None:
    """By long.cu, chains and trees."""
    if not env.use_pdl:
        return None
    own = own_tensors(call, env), partials(call, env), logit_scale(call)
    return long_launch(call, env, shape, *own, short, has_trees=True)


def tree_or_verification(
    call: OpCall, env: LaunchEnv, shape: StepShape, short: int
) -> Launch | None:
    """By tree.cu or verification.cu, chains and trees, whichever takes less time."""
    own = own_tensors(call, env), logit_scale(call)
    return tree.fast_tree_launch(call, env, shape, *own, short) if env.use_pdl else None


def triton(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    """By Triton's kernel, any chains."""
    return _split(call, env, shape, short, has_trees=False)


def triton_trees(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    """By Triton's kernel, any chains and trees."""
    return _split(call, env, shape, short, has_trees=True)


def _split(
    call: OpCall, env: LaunchEnv, shape: StepShape, short: int, *, has_trees: bool
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
