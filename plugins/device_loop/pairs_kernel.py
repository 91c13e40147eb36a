"""The launches that describe what a head that attends reads after a round; pairs_reference.py has
their meaning.

    read_pairs(state, pairs, verified, step, ...)   behind a chain: every row of its verification
    read_path(state, pairs, trees, verified, ...)   behind a tree: the rows of the accepted path
"""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch, StepLimits
from llmctl.plugins.device_loop.kernel import MAX_TILE, ONE_BLOCK, power_of_two
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees


def read_pairs(
    state: RoundState,
    pairs: RoundState,
    verified: DeviceStep,
    step: DeviceStep,
    batch: int,
    draft_len: int,
) -> Launch:
    """Prepare the head's step of every row of a verification, after acceptance; logits of each
    request's last accepted one."""
    arguments = (
        state.committed,
        pairs.committed,
        state.targets,
        verified.position_ids,
        verified.cu_q,
        verified.kv_len,
        verified.slot_mapping,
        step.token_ids,
        step.position_ids,
        step.cu_q,
        step.kv_len,
        step.slot_mapping,
        step.logit_rows,
        batch,
        draft_len + 1,
    )
    return Launch(read_pairs_spec(state.max_batch_size, state.max_draft_len), ONE_BLOCK, arguments)


def read_path(
    state: RoundState,
    pairs: RoundState,
    trees: DraftTrees,
    verified: DeviceStep,
    step: DeviceStep,
    limits: StepLimits,
    sources: torch.Tensor,
    batch: int,
    draft_len: int,
    depth: int,
) -> Launch:
    """Prepare the head's step of the rows on each accepted path, of up to `depth` drafts; logits of
    each request's last. sources int32 [batch * (depth + 1)]: which row of the verification each
    is."""
    arguments = (
        state.committed,
        pairs.committed,
        state.capacity,
        state.targets,
        trees.rows,
        trees.parents,
        verified.cu_q,
        step.token_ids,
        step.position_ids,
        step.cu_q,
        step.kv_len,
        step.block_tables,
        step.slot_mapping,
        step.logit_rows,
        sources,
        batch,
        draft_len,
        depth + 1,
        state.max_draft_len,
        limits.max_seq_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    return Launch(read_path_spec(state.max_batch_size), ONE_BLOCK, arguments)


def read_path_spec(max_batch_size: int) -> KernelSpec:
    """The binary of an engine of these limits."""
    return KernelSpec(
        name=f"rounds.read_path.b{max_batch_size}",
        source="llmctl.plugins.device_loop.triton_pairs:read_path",
        arguments=(*("*i32",) * 15, *("i32",) * 7),
        constants={"BLOCK_REQUESTS": power_of_two(max_batch_size), "BLOCK": 256, "PDL": True},
    )


def read_pairs_spec(max_batch_size: int, max_draft_len: int) -> KernelSpec:
    """The binary of an engine of these limits."""
    block_requests = power_of_two(max_batch_size)
    block_tokens = min(power_of_two(max_draft_len + 1), max(1, MAX_TILE // block_requests))
    return KernelSpec(
        name=f"rounds.read_pairs.b{max_batch_size}.k{max_draft_len}",
        source="llmctl.plugins.device_loop.triton_pairs:read_pairs",
        arguments=("*i32",) * 13 + ("i32",) * 2,
        constants={"BLOCK_REQUESTS": block_requests, "BLOCK_TOKENS": block_tokens, "PDL": True},
    )
