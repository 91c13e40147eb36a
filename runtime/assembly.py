"""Connects engines and a configuration to the parts that the worker runs."""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.errors import PairMismatch
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.api.executor_config import ExecutorConfig
from llmctl.runtime.drafting.cache_groups import cache_groups
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.length.adaptive import AdaptiveLengths
from llmctl.runtime.drafting.length.confidence import ConfidentDrafter
from llmctl.runtime.drafting.length.confident import ConfidentLengths
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.generate.verify import Verifier
from llmctl.runtime.kv_cache import KvCacheEventManager, KvCacheManager, most_step_tokens
from llmctl.runtime.kv_cache.block_mover import BlockMover
from llmctl.runtime.loop import Loop
from llmctl.runtime.rounds.rounds import RoundRunner, Rounds
from llmctl.runtime.schedule.chunk_tuning import AwaitedSteps, make_tuner
from llmctl.runtime.schedule.scheduler import Limits, Scheduler
from llmctl.runtime.stats.recorder import Recorder
from llmctl.runtime.step import StepRunner


@dataclass(frozen=True, slots=True)
class Parts:
    """What the worker runs. `lengths` and `tuner`, where requested, learn from finished steps."""

    target: StepRunner
    drafter: Drafter
    sampler: Sampler
    kv_cache: KvCacheManager
    scheduler: Scheduler
    loop: Loop
    recorder: Recorder
    lengths: AdaptiveLengths | ConfidentLengths | None
    tuner: AwaitedSteps | None


def assemble(
    target: StepRunner,
    drafter: Drafter,
    config: ExecutorConfig,
    sampling: SamplingBackend,
    round_runner: RoundRunner | None,
) -> Parts:
    """Allocate the caches and connect the parts. Raises PairMismatch, BadConfig, OutOfMemory."""
    if drafter.max_draft_len > target.max_draft_len:
        raise PairMismatch(
            f"the drafter proposes up to {drafter.max_draft_len} tokens per round; "
            f"the target engine was built for max_draft_len {target.max_draft_len}",
            fix="lower the draft length, or rebuild the target with a larger --max_draft_len",
        )
    groups = cache_groups(target, drafter)
    kv_cache = _kv_cache(target, drafter, config, tuple(groups))
    engine_limits = Limits(
        max_batch_size=target.max_batch_size,
        max_num_tokens=target.max_num_tokens,
        max_seq_len=target.max_seq_len,
        max_draft_len=drafter.max_draft_len,
    )
    limits = config.limits(engine_limits)
    lengths = _lengths(drafter, config, has_rounds=round_runner is not None)
    scheduler = Scheduler(config.scheduler, kv_cache, limits, lengths)
    tuner: AwaitedSteps | None = None
    if config.max_step_ms is not None:
        unit = max(target.tokens_per_block, target.context_group)
        tuner = make_tuner(config.max_step_ms, unit, limits.max_num_tokens)
        scheduler.set_token_budget(tuner.budget)
    sampler = Sampler(target.vocab_size, sampling)
    target.allocate_kv_cache(kv_cache.num_blocks)
    if kv_cache.num_host_blocks:
        target.allocate_host_blocks(kv_cache.num_host_blocks)
    drafter.prepare(kv_cache, sampler, config.acceptance == "logits")
    mover = BlockMover(kv_cache, groups)
    rounds: Rounds | None = None
    if round_runner is not None:
        is_limited = tuner is not None  # then every step has a time limit, including the first
        round_runner.prepare(limits.max_batch_size, is_limited * limits.max_num_tokens)
        rounds = Rounds(round_runner, scheduler, kv_cache, mover.start)
    loop = Loop(target, scheduler, mover, drafter, Verifier(sampler), rounds)
    recorder = Recorder(config, loop, scheduler, kv_cache, engine_limits)
    return Parts(target, drafter, sampler, kv_cache, scheduler, loop, recorder, lengths, tuner)


def _lengths(
    drafter: Drafter, config: ExecutorConfig, *, has_rounds: bool
) -> AdaptiveLengths | ConfidentLengths | None:
    """What chooses draft lengths; None: they are fixed. A drafter that knows how likely its drafts
    are has them chosen by that; device rounds have one length for all."""
    most, adapts = drafter.max_draft_len, config.adaptive_draft_len
    if not most or not (not has_rounds if adapts is None else adapts):
        return None
    if isinstance(drafter, ConfidentDrafter) and not has_rounds:
        return ConfidentLengths(most, drafter.confidence)
    return AdaptiveLengths(most, has_cache=bool(drafter.holders), is_common=has_rounds)


def _kv_cache(
    target: StepRunner, drafter: Drafter, config: ExecutorConfig, groups: tuple[str, ...]
) -> KvCacheManager:
    cache = config.kv_cache
    return KvCacheManager(
        cache.num_blocks,
        target.tokens_per_block,
        cache.enable_block_reuse,
        cache.enable_partial_reuse,
        groups=groups,
        num_host_blocks=cache.num_host_blocks,
        offload_min_priority=cache.secondary_offload_min_priority,
        events=KvCacheEventManager(cache.event_buffer_max_size),
        window=cache.window,
        # A device round may be one whole round ahead of what the host has read.
        max_step_tokens=most_step_tokens(target.max_num_tokens, drafter.max_draft_len),
        onboards_aside=target.onboards_aside,
        context_group=target.context_group,
    )
