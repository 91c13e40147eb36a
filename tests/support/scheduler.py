"""Schedulers over a cache of integers, and steps done by hand."""

from __future__ import annotations

import itertools

from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Batch, FinishReason, Request, Sequence
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import (
    CapacitySchedulerPolicy,
    Limits,
    Scheduler,
    SchedulerConfig,
)

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS


BLOCK = 4  # tokens_per_block of every cache here


_ids = itertools.count(1)


def make_sequence(num_prompt_tokens, max_tokens=8, first_token=None):
    """A fresh sequence; unless first_token is given its prompt shares no prefix with others."""
    sequence_id = next(_ids)
    first = 1000 * sequence_id if first_token is None else first_token
    tokens = list(range(first, first + num_prompt_tokens))
    return Sequence(
        sequence_id=sequence_id,
        request_id=sequence_id,
        request=Request(tuple(tokens), max_tokens=max_tokens),
        index=0,
        tokens=tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_len=num_prompt_tokens + max_tokens,
    )


def make_scheduler(
    num_blocks=64, batch=8, tokens=64, draft_len=0, seq_len=200, has_draft=False, group=0, **config
):
    groups = ("target", "draft")[: 1 + has_draft]
    cache = KvCacheManager(num_blocks, BLOCK, groups=groups, context_group=group)
    limits = Limits(batch, tokens, seq_len, draft_len)
    return Scheduler(SchedulerConfig(**config), cache, limits), cache


def finish_step(scheduler, batch, accepted=0):
    """Commit one emitted token and `accepted` drafts for every slice that has logits."""
    for part in batch.slices:
        sequence, draft_len = part.sequence, part.draft_len
        sequence.kv_len = part.start + part.num_tokens
        if part.needs_logits:
            taken = min(accepted, draft_len)
            sequence.tokens += [7] * (taken + 1)
            sequence.kv_len += taken
            if len(sequence.tokens) >= sequence.max_len:
                sequence.finish_reason = FinishReason.LENGTH
        sequence.kv_lens = [sequence.kv_len] * len(sequence.kv_lens)
    scheduler.update(batch)


def shape(batch: Batch):
    """((context chunk sizes), (draft lengths)) of a batch."""
    return (
        tuple(part.num_tokens for part in batch.context),
        tuple(part.draft_len for part in batch.generation),
    )


def start_generation(scheduler, *prompt_lens, max_tokens=40):
    """Add prompts and step until all of them are in generation."""
    sequences = [make_sequence(length, max_tokens) for length in prompt_lens]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or any(sequence.is_context for sequence in scheduler.active):
        finish_step(scheduler, scheduler.schedule())
    return sequences
