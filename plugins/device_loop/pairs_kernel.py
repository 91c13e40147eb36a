"""The launch that describes what a head that attends reads after a round; pairs_reference.py has
its meaning."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch
from llmctl.plugins.device_loop.kernel import MAX_TILE, ONE_BLOCK, power_of_two
from llmctl.plugins.device_loop.state import RoundState


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
