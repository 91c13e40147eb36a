"""Launches of the bookkeeping between the forward passes of a round.

    draft_first(state, step, limits, batch)     the draft's step of two tokens per request, at most
    draft_next(state, step, limits, batch, j)   its step of draft j - 1, for 1 <= j < k
    draw_next(logits, scratch, state, step, limits, batch, j)   draft j - 1 by argmax, and that
    verify(state, step, limits, batch, k)       the target's step of k + 1 tokens per request
    accept(state, batch, k)                     what was accepted, into the state and the ring

`step` and `limits` are those of the engine that runs next; `batch` says how many requests its graph
has room for: b < batch. reference.py has the meaning of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch, StepLimits
from llmctl.plugins.device_loop.state import RECORD_TOKENS, RoundState
from llmctl.plugins.ops.sampling.arrays import CHUNK, SamplingScratch
from llmctl.plugins.ops.sampling.kernel import AWAITED_WARPS, awaited

if TYPE_CHECKING:
    import torch

_SOURCE = "llmctl.plugins.device_loop.triton_kernel"
MAX_TILE = 2048  # elements that the thread block holds of each array
ONE_BLOCK = (1, 1, 1)


def kernels(max_batch_size: int, max_draft_len: int, vocab: int) -> list[KernelSpec]:
    """The binaries of an engine with `vocab` logits for rounds: as the target, whose sizes the
    state has, and as the draft."""
    return [
        _feed_spec(max_batch_size, max_draft_len),
        _draw_spec(max_batch_size, vocab),
        _accept_spec(max_batch_size, max_draft_len),
    ]


def draft_first(
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    *,
    only_chains: bool = False,
) -> Launch:
    """Prepare the draft step of the last two committed tokens of each request; logits of the
    second. Where drafts are `only_chains`, a batch's only request has just the second, and padding,
    if the first was read before."""
    skips = only_chains and batch == 1
    return _feed(state, step, limits, batch, first=-1, count=2, rows=1, may_skip=skips)


def draft_next(
    state: RoundState, step: DeviceStep, limits: StepLimits, batch: int, index: int
) -> Launch:
    """Prepare the draft step of its own token `index` - 1; logits of it. 1 <= index < draft_len."""
    return _feed(state, step, limits, batch, first=index, count=1, rows=1)


def draw_next(
    logits: torch.Tensor,
    scratch: SamplingScratch,
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    index: int,
) -> Launch:
    """Draft `index` - 1 of each request is the best id of its row of `logits` [batch, vocab], -1
    with NaN; then `draft_next`, in one launch. Its binary is among the draft engine's."""
    vocab = logits.shape[1]
    arguments: tuple[torch.Tensor | int, ...] = (
        logits,
        scratch.keys,
        state.committed,
        state.capacity,
        state.drafts,
        *step_arrays(step),
        batch,
        index - 1,
        state.max_draft_len,
        limits.max_seq_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    spec = _draw_spec(limits.max_batch_size, vocab)
    return Launch(spec, (-(-vocab // CHUNK), batch, 1), arguments)


def verify(
    state: RoundState, step: DeviceStep, limits: StepLimits, batch: int, draft_len: int
) -> Launch:
    """Prepare the target step of the root and `draft_len` drafts; logits of all. With draft_len 0
    this is plain decoding."""
    return _feed(state, step, limits, batch, first=0, count=draft_len + 1, rows=draft_len + 1)


def accept(state: RoundState, batch: int, draft_len: int) -> Launch:
    """Compare `state.targets` with the drafts, advance the requests and write records to the
    ring."""
    spec = _accept_spec(state.max_batch_size, state.max_draft_len)
    arguments = (
        state.root,
        state.previous,
        state.committed,
        state.max_len,
        state.drafts,
        state.targets,
        state.counter,
        state.ring,
        batch,
        draft_len,
        state.ring.shape[0],
    )
    return Launch(spec, ONE_BLOCK, arguments)


def _feed(
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    *,
    first: int,
    count: int,
    rows: int,
    may_skip: bool = False,
) -> Launch:
    spec = _feed_spec(state.max_batch_size, state.max_draft_len)
    arguments: tuple[torch.Tensor | int, ...] = (
        state.root,
        state.previous,
        state.num_read,
        state.committed,
        state.capacity,
        state.drafts,
        *step_arrays(step),
        batch,
        first,
        count,
        rows,
        int(may_skip),
        limits.max_seq_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    return Launch(spec, ONE_BLOCK, arguments)


def step_arrays(step: DeviceStep) -> tuple[torch.Tensor, ...]:
    """What a step is described by, as kernels take it."""
    return (
        step.token_ids,
        step.position_ids,
        step.cu_q,
        step.kv_len,
        step.block_tables,
        step.slot_mapping,
        step.logit_rows,
    )


def power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _feed_spec(max_batch_size: int, max_draft_len: int) -> KernelSpec:
    block_requests = power_of_two(max_batch_size)
    block_tokens = min(power_of_two(max_draft_len + 1), max(1, MAX_TILE // block_requests))
    return KernelSpec(
        name=f"rounds.feed.b{max_batch_size}.k{max_draft_len}",
        source=f"{_SOURCE}:feed",
        arguments=("*i32",) * 13 + ("i32",) * 8,
        constants={
            "MAX_DRAFT_LEN": max_draft_len,
            "BLOCK_REQUESTS": block_requests,
            "BLOCK_TOKENS": block_tokens,
            "PDL": True,
        },
    )


def _draw_spec(max_batch_size: int, vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"rounds.draw_next.b{max_batch_size}.v{vocab}",
        source=f"{_SOURCE}:draw_next",
        arguments=("*fp32", "*i64", *("*i32",) * 10, *("i32",) * 6),
        constants={
            **awaited(vocab),
            "BLOCK_REQUESTS": power_of_two(max_batch_size),
            "PDL": True,
        },
        num_warps=AWAITED_WARPS,
    )


def _accept_spec(max_batch_size: int, max_draft_len: int) -> KernelSpec:
    block_record = power_of_two(RECORD_TOKENS + max_draft_len + 1)
    block_requests = min(power_of_two(max_batch_size), max(1, MAX_TILE // block_record))
    return KernelSpec(
        name=f"rounds.accept.b{max_batch_size}.k{max_draft_len}",
        source=f"{_SOURCE}:accept",
        arguments=("*i32",) * 8 + ("i32",) * 3,
        constants={
            "MAX_BATCH_SIZE": max_batch_size,
            "MAX_DRAFT_LEN": max_draft_len,
            "BLOCK_REQUESTS": block_requests,
            "BLOCK_RECORD": block_record,
            "PDL": True,
        },
    )
