"""A loop over fake engines whose caches are audited after every step."""

from __future__ import annotations

import numpy as np

from llmctl.plugins.ops.paged_attention.fp8_context import context_end
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP, cache_groups
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.generate.verify import Verifier
from llmctl.runtime.kv_cache import AttentionWindow, KvCacheManager
from llmctl.runtime.kv_cache.block_mover import BlockMover
from llmctl.runtime.loop import Loop
from llmctl.runtime.request import FinishReason, Request, Sequence
from llmctl.runtime.rounds.rounds import Rounds
from llmctl.runtime.schedule.scheduler import Limits, Scheduler, SchedulerConfig
from support.fake_engine import FP8, FakeEngine, as_computed, plain_answer
from support.fake_rounds import FakeRunner


class AuditedScheduler(Scheduler):
    """Checks lengths at the moment blocks are published, finished sequences included."""

    def update(self, batch) -> None:
        for item in batch.slices:
            committed = len(item.sequence.tokens)
            assert item.sequence.kv_len <= committed - 1, "an entry of a token that was cut"
            assert max(item.sequence.kv_lens) <= committed - 1, "a draft entry of a cut token"
        super().update(batch)


class Harness:
    """Scheduler, cache and loop without the executor's thread; audits caches after every step."""

    def __init__(
        self,
        target: FakeEngine,
        drafter=None,
        *,
        draft: FakeEngine | None = None,
        num_blocks: int = 200,
        num_host_blocks: int = 0,
        window: AttentionWindow | None = None,
        reuse: bool = True,
        config: SchedulerConfig | None = None,
        by_logits: bool = False,
        draft_lengths=None,
        sampling: SamplingBackend | None = None,
        on_device: bool = False,
        runner=None,
    ) -> None:
        self.target, self.draft = target, draft
        self.oracle = target  # whose plain answers are the right ones
        self.drafter = drafter or NoDrafter()
        groups = cache_groups(target, self.drafter)
        self.kv_cache = KvCacheManager(
            num_blocks,
            target.tokens_per_block,
            reuse,
            reuse,
            groups=tuple(groups),
            num_host_blocks=num_host_blocks,
            window=window,
            max_step_tokens=max(target.max_num_tokens, 2 * self.drafter.max_draft_len + 3),
            onboards_aside=target.onboards_aside,
            context_group=target.context_group,
        )
        self.limits = Limits(
            target.max_batch_size,
            target.max_num_tokens,
            target.max_seq_len,
            self.drafter.max_draft_len,
        )
        self.scheduler = AuditedScheduler(
            config or SchedulerConfig(), self.kv_cache, self.limits, draft_lengths
        )
        self.sampler = Sampler(target.vocab_size, sampling or ReferenceSampling())
        target.allocate_kv_cache(num_blocks)
        target.allocate_host_blocks(num_host_blocks)
        self.drafter.prepare(self.kv_cache, self.sampler, by_logits)
        self.runner, self.rounds = runner, None
        if on_device:
            self.runner = FakeRunner(target, draft, self.drafter.max_draft_len)
        mover = BlockMover(self.kv_cache, groups)
        if self.runner is not None:
            self.rounds = Rounds(self.runner, self.scheduler, self.kv_cache, mover.start)
        self.loop = Loop(
            target, self.scheduler, mover, self.drafter, Verifier(self.sampler), self.rounds
        )
        self.num_sequences = 0

    def add(self, request: Request, index: int = 0) -> Sequence:
        self.num_sequences += 1
        prompt = list(request.input_token_ids)
        sequence = Sequence(
            sequence_id=self.num_sequences,
            request_id=self.num_sequences,
            request=request,
            index=index,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            max_len=min(len(prompt) + request.max_tokens, self.target.max_seq_len),
            context_end=context_end(len(prompt), self.target.context_group),
        )
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.cancel(sequence)
        self.drafter.release(sequence)

    def step(self):
        report = self.loop.step()
        self.audit()
        return report

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def run_arriving(self, generator: np.random.Generator, requests, horizon: int) -> None:
        """Run requests that arrive over `horizon` steps, cancelling a few, and compare every
        output with the plain answer; a cancelled one with its beginning."""
        arrivals = sorted(generator.integers(0, horizon, len(requests)).tolist())
        waiting = list(zip(arrivals, requests, strict=True))
        sequences, cancelled, step = [], set(), 0
        while waiting or self.scheduler.has_work:
            while waiting and waiting[0][0] <= step:
                sequences.append(self.add(waiting.pop(0)[1]))
            if sequences and generator.random() < 0.03:
                victim = sequences[generator.integers(len(sequences))]
                if victim.finish_reason is FinishReason.NOT_FINISHED:
                    self.cancel(victim)
                    cancelled.add(victim.sequence_id)
            if self.scheduler.has_work:
                self.step()
            step += 1
        for sequence in sequences:
            tokens, reason = plain_answer(self.oracle, sequence.request)
            found = sequence.tokens[sequence.num_prompt_tokens :]
            if sequence.sequence_id in cancelled:
                assert found == tokens[: len(found)]
                continue
            assert found == tokens
            assert sequence.finish_reason is reason
            if sequence.request.output_config.return_log_probs:
                assert len(sequence.log_probs) == len(tokens)
        assert self.kv_cache.stats().used_num_blocks == 0

    def audit(self) -> None:
        """Every cache entry that counts as valid holds the committed token of its position."""
        self.kv_cache.check_invariants()
        for sequence in self.scheduler.active:
            assert max(sequence.kv_lens) <= len(sequence.tokens) - 1
            self._audit_cache(self.target, sequence, sequence.kv_len)
            if self.draft is not None:
                self._audit_cache(self.draft, sequence, sequence.kv_lens[DRAFT_GROUP])

    def _audit_cache(self, engine, sequence: Sequence, length: int) -> None:
        """But for blocks that copies will have filled before the next step reads them."""
        pending = {copy.dst_block for copy in self.kv_cache._store.copies}
        pending |= {block for block in sequence.block_table if block in self.kv_cache.arrivals}
        blocks = np.repeat(sequence.block_table, engine.tokens_per_block)[:length]
        is_there = np.isin(blocks, list(pending), invert=True)
        found = engine.read(sequence.block_table, length, is_there)
        known = np.minimum(sequence.tokens[:length], engine.vocab_size - 1)
        if engine is self.target:
            wanted = as_computed(known, sequence.context_end)
        else:  # whose drafts' bits follow from how it was fed
            wanted, found = known, found % FP8
        assert (found == wanted)[is_there].all()
