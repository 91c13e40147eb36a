"""What the bookkeeping kernels do, request by request."""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.device_loop.state import RECORD_TOKENS, RoundState
from llmctl.plugins.ops.sampling.reference import argmax_rows


def draft_first(
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    *,
    only_chains: bool = False,
) -> None:
    """The two last committed tokens of each request, at positions committed - 2 and - 1. If there
    is one request only, of which the first of them was read, the second and padding."""
    if only_chains and batch == 1 and state.num_read[0] >= state.committed[0] - 1:
        _feed(state, step, limits, batch, state.root[:, None], first=0, rows=1)
        step.token_ids[1] = step.position_ids[1] = 0
        step.slot_mapping[1] = -1
        return
    tokens = torch.stack((state.previous, state.root), dim=1)
    _feed(state, step, limits, batch, tokens, first=-1, rows=1)


def draft_next(
    state: RoundState, step: DeviceStep, limits: StepLimits, batch: int, index: int
) -> None:
    """Draft `index` - 1 of each request, at position committed - 1 + index."""
    _feed(state, step, limits, batch, state.drafts[:, index - 1 : index], first=index, rows=1)


def draw_next(
    logits: torch.Tensor,
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    index: int,
) -> None:
    """Draft `index` - 1 of each request is the best id of its row; then `draft_next`."""
    state.drafts[:batch, index - 1] = torch.from_numpy(argmax_rows(logits[:batch].numpy()))
    draft_next(state, step, limits, batch, index)


def verify(
    state: RoundState, step: DeviceStep, limits: StepLimits, batch: int, draft_len: int
) -> None:
    """The root and the drafts of each request, from position committed - 1 on. What drafted them
    has read all but the last."""
    for request in range(batch):
        if state.committed[request] > 0:
            state.num_read[request] = state.committed[request] + draft_len - 1
    tokens = torch.cat((state.root[:, None], state.drafts[:, :draft_len]), dim=1)
    _feed(state, step, limits, batch, tokens, first=0, rows=draft_len + 1)


def accept(state: RoundState, batch: int, draft_len: int) -> None:
    """Keep each request's leading drafts that the target drew too, and the target's next token.

    A request never keeps more drafts than max_len leaves room for. Rows of padding are zeros.
    """
    record = state.ring[int(state.counter) % len(state.ring)]
    record.zero_()
    for request in range(batch):
        committed = int(state.committed[request])
        if committed == 0:
            continue
        drawn = state.targets[request * (draft_len + 1) :][: draft_len + 1].tolist()
        drafts = state.drafts[request].tolist()
        room = min(draft_len, int(state.max_len[request]) - committed - 1)
        kept = 0
        while kept < room and drafts[kept] == drawn[kept]:
            kept += 1
        tokens = [int(state.root[request]), *drawn[: kept + 1]]
        row = [committed, kept, kept + 1, max(0, room), *tokens[1:]]
        record[request, : RECORD_TOKENS + kept + 1] = torch.tensor(row, dtype=torch.int32)
        state.previous[request], state.root[request] = tokens[-2], tokens[-1]
        state.committed[request] = committed + kept + 1
    state.counter.add_(1).bitwise_and_(0x7FFFFFFF)


def _feed(
    state: RoundState,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    tokens: torch.Tensor,
    *,
    first: int,
    rows: int,
) -> None:
    """Describe a step of `tokens` [B, q], the first of them `first` places after the root.

    Real requests are packed without gaps; tokens of padding requests follow with slot -1. Row
    b * rows + i of the logits is request b's in any case. Positions without a reserved block get
    slot -1, and no position reaches max_seq_len: what is computed there is never accepted.
    """
    count, per_block = tokens.shape[1], limits.tokens_per_block
    real = [b for b in range(batch) if state.committed[b] > 0]
    padding = [b for b in range(batch) if state.committed[b] == 0]
    step.cu_q[0] = 0
    for place, request in enumerate(real + padding):
        committed, capacity = int(state.committed[request]), int(state.capacity[request])
        is_real = place < len(real)
        step.kv_len[request] = min(committed + first + count - 1, capacity) if is_real else 0
        for i in range(count):
            index, position = place * count + i, committed - 1 + first + i
            has_slot = is_real and 0 <= position < capacity
            step.token_ids[index] = tokens[request, i] if is_real else 0
            step.position_ids[index] = min(position, limits.max_seq_len - 1) if is_real else 0
            step.slot_mapping[index] = -1
            if has_slot:
                block = int(step.block_tables[request, position // per_block])
                step.slot_mapping[index] = block * per_block + position % per_block
            row = i - (count - rows)
            if row >= 0:
                step.logit_rows[request * rows + row] = index
    is_real_flags = (state.committed[:batch] > 0).to(torch.int32)
    step.cu_q[1 : batch + 1] = is_real_flags.cumsum(0) * count
