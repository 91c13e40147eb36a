"""Paged attention on a GPU: which binaries there are, and how a step launches them.

Kernels for generation and verification (up to SHORT tokens per request, or a whole tree of tokens)
split the keys over thread blocks; those for longer requests, the context chunks, do not. A step
that may have both launches both kernels, and each skips the other's requests: the result of a row
is the same in either. The tables below say which kernel serves the short requests (ways.py);
chunk.cu processes context chunks, but for tokens with FP8 products, which are chunk_fp8.cu's, and
what it does not cover, which is Triton's.

Where every token has FP8 products, short requests are few_fp8.cu's and all others chunk_fp8.cu's.
"""

from __future__ import annotations

from collections.abc import Callable
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
from llmctl.plugins.ops.paged_attention import ways
from llmctl.plugins.ops.paged_attention.batch.batch import (
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
    is_read,
)
from llmctl.plugins.ops.paged_attention.few_fp8.few_fp8 import few_fp8_launch, few_fp8_specs
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.paged_attention.generation.generation import covers, generation_specs
from llmctl.plugins.ops.paged_attention.launch_arguments import (
    logit_scale,
    own_tensors,
    partials,
)
from llmctl.plugins.ops.paged_attention.long.long import long_specs
from llmctl.plugins.ops.paged_attention.long_batch.long_batch import long_batch_specs
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT, group_size
from llmctl.plugins.ops.paged_attention.tree import tree
from llmctl.plugins.ops.paged_attention.triton.specs import (
    ROWS,
    context_rows,
    context_spec,
    split_spec,
    window_arguments,
)
from llmctl.plugins.ops.paged_attention.verification.verification import verification_specs

Way = Callable[[OpCall, LaunchEnv, StepShape, int], Launch | None]
# Who serves the short requests of a step: the first in a table with a launch for it.
_CHAINS: tuple[Way, ...] = (
    ways.verification,  # few thread blocks, which all run at once and have to be fast together
    ways.generation,
    ways.tree_of_chains,  # many requests of several tokens
    ways.batch,  # many requests of one token or two
    ways.triton,  # all others
)
_CHAINS_OF_64 = (  # the ring of a small model's next product fills beside generation.cu
    ways.generation,
    ways.verification,
    *_CHAINS[2:],
)
_IN_LONG_CONTEXTS: tuple[Way, ...] = (  # asked before those above
    ways.batch_of_any,  # one token or two
    ways.long_chains,  # more
)
_TREES: tuple[Way, ...] = (  # and the chains beside them
    ways.long_trees,
    ways.tree_or_verification,
    ways.triton_trees,
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
    if fp8_tokens(call.attributes) is Fp8Tokens.ALL:
        return [*fp8_specs(call, limits), *few_fp8_specs(call, limits)]
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
    if fp8_tokens(call.attributes) is Fp8Tokens.ALL:
        return _by_fp8(call, env, shape)
    if shape.max_tree_len:
        short = max(SHORT, shape.max_tree_len)  # longer than a tree: a context chunk
        trees = _short(call, env, shape, short)
        is_all = shape.max_query_len <= short
        return [trees] if is_all else [*_context(call, env, shape, short + 1), trees]
    if shape.max_query_len <= SHORT:
        return [_short(call, env, shape, SHORT)]
    if shape.num_requests == 1:
        return _context(call, env, shape, 1)
    # Beside chunks most requests have one token; the context kernel takes who has a few more.
    if (batch := ways.batch_beside_chunks(call, env, shape)) is not None:
        return [*_context(call, env, shape, most_tokens(call) + 1), batch]
    return [*_context(call, env, shape, SHORT + 1), _short(call, env, shape, SHORT)]


def _by_fp8(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Where every token has FP8 products."""
    assert not shape.max_tree_len, "a tree for kernels of chains"
    own, room, scale = own_tensors(call, env), partials(call, env), logit_scale(call)
    found, is_alone = [], shape.num_requests == 1
    if has_chunks := shape.max_query_len > SHORT:
        least = 1 if is_alone else SHORT + 1
        found += fp8_launches(call, env, shape, own, room[1], scale, least)
    if not (has_chunks and is_alone):
        found.append(few_fp8_launch(call, env, shape, own, room, scale, SHORT))
    return found


def _short(call: OpCall, env: LaunchEnv, shape: StepShape, short: int) -> Launch:
    """For requests of up to `short` tokens."""
    asked = _CHAINS_OF_64 if int(call.attributes["head_size"]) == 64 else _CHAINS
    if shape.max_tree_len:
        asked = _TREES
    elif is_long(env.limits, shape.max_kv_len):
        asked = (*_IN_LONG_CONTEXTS, *asked)
    found = (way(call, env, shape, short) for way in asked)
    return next(launch for launch in found if launch is not None)


def _context(call: OpCall, env: LaunchEnv, shape: StepShape, min_tokens: int) -> list[Launch]:
    has_fp8 = fp8_tokens(call.attributes) is Fp8Tokens.PROMPTS
    if has_fp8 or (env.use_pdl and covers_chunks(call, env.limits)):
        own = own_tensors(call, env), partials(call, env)[1], logit_scale(call), min_tokens
        has_groups = has_fp8 and shape.max_query_len >= GROUP and is_read(call)
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
