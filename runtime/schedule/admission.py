"""What a scheduler accepts: policies, limits, and which sequences could ever run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from operator import index

from llmctl.errors import BadConfig, OutOfMemory, PromptTooLong
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Request, Sequence
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy, Cuts


class CapacitySchedulerPolicy(enum.Enum):
    """When a waiting sequence may start.

    MAX_UTILIZATION: when its current tokens fit; if blocks run out, the lowest priority is paused
    (among equals the latest started) and recomputed later. GUARANTEED_NO_EVICT: when it fits at
    its full length. STATIC_BATCH: the same, but only when nothing is active.
    """

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


@refused.refuses(refused.SCHEDULER)
@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policies; the defaults are the ones for serving."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    enable_chunked_context: bool = True

    def __post_init__(self) -> None:
        check_types(self)  # the name of a policy would compare unequal to all


@refused.refuses()
@dataclass(frozen=True, slots=True)
class Limits:
    """What the engines (target and draft together) can process in one step."""

    max_batch_size: int  # sequences
    max_num_tokens: int  # packed tokens, drafts included
    max_seq_len: int  # prompt + output of one sequence
    max_draft_len: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_draft_len < 0:
            raise BadConfig(f"max_draft_len is {self.max_draft_len}; it must be at least 0")

    @property
    def max_active(self) -> int:
        """Started sequences: when all of them generate, each has a token in the same step."""
        return min(self.max_batch_size, self.max_num_tokens)


MOST_STEP_MS = 1e9


def refuse_step_limit(max_step_ms: object, *, is_chunked: bool) -> None:
    """Raise BadConfig for what is no limit of a step's time, and where nothing could keep one."""
    is_time = isinstance(max_step_ms, int | float) and 0 < max_step_ms < MOST_STEP_MS  # not NaN
    if not is_time and max_step_ms != "auto":
        found = f"{max_step_ms:g}" if isinstance(max_step_ms, int | float) else repr(max_step_ms)
        raise BadConfig(
            f"--max-step-ms is {found}; it must be auto, or more than 0 ms and less than "
            f"{MOST_STEP_MS:g}",
            fix="leave --max-step-ms out for the largest chunks",
        )
    if not is_chunked:
        raise BadConfig(
            "--max-step-ms shrinks the chunks of prompts, and --no-enable-chunked-context has none",
            fix="leave one of the two out",
        )


def refuse_small_steps(config: SchedulerConfig, limits: Limits, cuts: Cuts) -> None:
    """Raise BadConfig where not even the smallest context chunk fits a step."""
    if not config.enable_chunked_context or limits.max_num_tokens >= cuts.widest:
        return
    if cuts.group > cuts.block:
        raise BadConfig(
            f"max_num_tokens is {limits.max_num_tokens}; the engine reads prompts with FP8 "
            f"products, {cuts.group} tokens at a time",
            fix=f"use at least {cuts.group}, or rebuild with --use_fp8_context_fmha disable",
        )
    raise BadConfig(
        f"max_num_tokens is {limits.max_num_tokens}, less than one block of "
        f"{cuts.block} tokens, the smallest context chunk",
        fix=f"use at least {cuts.block}, or rebuild with a larger --max_num_tokens or a "
        "smaller --tokens_per_block",
    )


def refuse_token_budget(num_tokens: int, limits: Limits, cuts: Cuts | None) -> None:
    """Raise BadConfig for a budget per step that the engine cannot keep. cuts: None: prompts are
    not cut."""
    if cuts is None:
        raise BadConfig(
            "a token budget per step needs chunked context, which is off",
            fix="turn --enable_chunked_context on",
        )
    if not cuts.widest <= num_tokens <= limits.max_num_tokens:
        unit = "a group that FP8 products read" if cuts.group > cuts.block else "one block"
        raise BadConfig(
            f"the token budget is {num_tokens}; it must be from {cuts.widest} ({unit}) to "
            f"{limits.max_num_tokens} (max_num_tokens)"
        )


def refuse_unservable(
    sequence: Sequence, config: SchedulerConfig, limits: Limits, kv_cache: KvCacheManager
) -> None:
    """Raise for a fresh sequence that could never run to its end, even alone.

    PromptTooLong: max_seq_len, or max_num_tokens without chunking. OutOfMemory: the KV cache.
    """
    num_prompt_tokens = len(sequence.tokens)
    refuse_long_prompt(num_prompt_tokens, limits.max_seq_len)
    assert num_prompt_tokens < sequence.max_len <= limits.max_seq_len
    # A paused sequence resumes with all its output as context.
    may_pause = config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    longest = sequence.max_len - 1 if may_pause else num_prompt_tokens
    if not config.enable_chunked_context and longest > limits.max_num_tokens:
        raise PromptTooLong(
            f"a context of {longest} tokens in one step exceeds max_num_tokens "
            f"{limits.max_num_tokens}, and enable_chunked_context is off",
            fix="turn --enable_chunked_context on, or rebuild with a larger --max_num_tokens",
        )
    num_blocks = kv_cache.num_blocks_to_hold(sequence, sequence.max_len - 1)
    if num_blocks > kv_cache.num_usable_blocks:
        raise OutOfMemory(
            f"a sequence of {sequence.max_len} tokens needs {num_blocks} KV blocks; the cache "
            f"has {kv_cache.num_usable_blocks} of {kv_cache.tokens_per_block} tokens",
            fix="request fewer output tokens, or raise --kv_cache_free_gpu_memory_fraction (and "
            "--max_tokens_in_paged_kv_cache, if that is given)",
        )


def refuse_long_prompt(num_tokens: int, max_seq_len: int) -> None:
    """Raise PromptTooLong for a prompt that leaves no room for a new token."""
    if num_tokens >= max_seq_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens; max_seq_len {max_seq_len} "
            f"leaves room for at most {max_seq_len - 1}",
            fix="shorten the prompt, or rebuild with a larger --max_seq_len",
        )


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise BadConfig for the first id in a request that the engine does not have, and for bad
    words that leave no token."""
    words = (
        ("input_token_ids", (request.input_token_ids,)),
        ("stop_words", request.stop_words),
        ("bad_words", request.bad_words),
        ("end_id", () if request.end_id is None else ((request.end_id,),)),
        ("further_end_ids", (request.further_end_ids,) if request.further_end_ids else ()),
    )
    for name, lists in words:
        for ids in lists:
            try:
                kinds = set(map(type, ids))
                if bool in kinds:
                    raise TypeError
                if kinds - {int}:
                    ids = tuple(map(index, ids))
                is_known = min(ids) >= 0 and max(ids) < vocab_size
            except TypeError:
                raise BadConfig(f"{name} holds what is no token id: {ids!r:.80}") from None
            if not is_known:
                found = next(token for token in ids if not 0 <= token < vocab_size)
                raise BadConfig(
                    f"{name} holds token id {found}; the engine's ids are 0 to {vocab_size - 1}"
                )
    always = {word[0] for word in request.bad_words if len(word) == 1}
    if request.sampling_config.min_tokens > 0:
        always |= set(request.end_ids)
    if len(always) >= vocab_size:  # a draw among none gives a banned one
        raise BadConfig(
            f"bad_words ban every token of the engine, which has {vocab_size}",
            fix="leave at least one token that may be generated",
        )
