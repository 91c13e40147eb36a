"""The life of one request inside the executor, and its responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from llmctl.plugins.ops.paged_attention.fp8_context import context_end
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import FinishReason, Request, Sequence
from llmctl.runtime.response import Response, Result
from llmctl.runtime.stats.counters import RequestStage, RequestStats
from llmctl.runtime.stats.request_metrics import PerfTrace, kv_cache_metrics


@dataclass(slots=True)
class TrackedRequest:
    """A request from enqueue to its final response. The executor's thread owns it once received.

    `held` are sequences not yet given to the scheduler: with block reuse they wait until the first
    sequence has computed the prompt they share.
    """

    request_id: int
    request: Request
    arrived_s: float  # monotonic
    sequences: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    is_started: bool = False
    num_iterations: int = 0  # steps in which any of its sequences ran
    num_delivered: list[int] = field(default_factory=list)  # new tokens, by sequence
    trace: PerfTrace = field(init=False)

    def __post_init__(self) -> None:
        self.trace = PerfTrace(self.arrived_s)

    @property
    def is_out_of_time(self) -> bool:
        """True when the request's allotted time is over."""
        allotted_ms = self.request.allotted_time_ms
        return allotted_ms is not None and monotonic() - self.arrived_s >= allotted_ms / 1e3

    def make_sequences(self, first_id: int, max_seq_len: int, context_group: int) -> None:
        """One sequence per returned output, with consecutive ids from `first_id`. context_group:
        see StepRunner."""
        prompt = self.request.input_token_ids
        max_len = min(len(prompt) + self.request.max_tokens, max_seq_len)
        count = self.request.sampling_config.num_return_sequences
        self.sequences = [
            Sequence(
                sequence_id=first_id + index,
                request_id=self.request_id,
                request=self.request,
                index=index,
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                max_len=max_len,
                context_end=context_end(len(prompt), context_group),
            )
            for index in range(count)
        ]
        self.num_delivered = [0] * count
        self.num_unfinished = count

    def pack_prompt(self) -> None:
        """Make the array of the prompt's ids that steps read, one for all sequences."""
        ids = self.sequences[0].pack_prompt()
        for sequence in self.sequences:
            sequence.prompt_ids = ids

    def respond(self, sequence: Sequence) -> Response:
        """The response with the new tokens of a sequence; final when it has finished, by its
        finish_reason.

        Counts finished sequences. A cancelled one ends with no tokens; one that timed out has what
        it had generated.
        """
        request = self.request
        output = request.output_config
        is_over = sequence.finish_reason is not FinishReason.NOT_FINISHED
        if is_over:
            self.num_unfinished -= 1
        is_final = is_over and self.num_unfinished == 0
        skip = 0
        if request.streaming and not output.return_all_generated_tokens:
            skip = self.num_delivered[sequence.index]
        first = sequence.num_prompt_tokens + skip
        if not request.streaming and not output.exclude_input_from_output:
            first = 0
        is_kept = sequence.finish_reason is not FinishReason.CANCELLED
        self.num_delivered[sequence.index] = sequence.num_new_tokens
        log_probs, cum_log_prob = None, None
        if output.return_log_probs:
            log_probs = tuple(sequence.log_probs[skip:]) if is_kept else ()
            cum_log_prob = sum(sequence.log_probs)
        metrics = None
        if is_final and output.return_perf_metrics:
            metrics = self.trace.metrics(self.sequences)
        result = Result(
            sequence.index,
            tuple(sequence.tokens[first:]) if is_kept else (),
            is_over,
            is_final,
            sequence.finish_reason,
            log_probs,
            cum_log_prob,
            decoding_iter=self.num_iterations,
            request_perf_metrics=metrics,
        )
        return Response(self.request_id, request.client_id, result)

    def note(self, commit: Commit, iteration: int, now_s: float) -> None:
        """One of its sequences was part of this step."""
        trace = self.trace
        if trace.last_iter != iteration:
            self.num_iterations += 1
            trace.note_step(iteration)
        if commit.num_drafts:
            trace.num_draft_tokens += commit.num_drafts
            trace.num_accepted_tokens += min(commit.accepted, commit.num_tokens)
        if commit.num_tokens:
            trace.note_tokens(now_s)

    def refuse(self, error: Exception) -> Response:
        """The error that ends the request."""
        return Response(self.request_id, self.request.client_id, error=error)

    def end_unfinished(self, reason: FinishReason) -> list[Response]:
        """Final responses for every sequence still running."""
        responses = []
        for sequence in self.sequences:
            if sequence.finish_reason is FinishReason.NOT_FINISHED:
                sequence.finish_reason = reason
                responses.append(self.respond(sequence))
        return responses

    def stats(self, was_scheduled: bool) -> RequestStats:
        """The state of the request after a step."""
        lead = next(
            (s for s in self.sequences if s.finish_reason is FinishReason.NOT_FINISHED),
            self.sequences[0],
        )
        num_generated = sum(sequence.num_new_tokens for sequence in self.sequences)
        num_prompt_tokens = lead.num_prompt_tokens
        blocks = kv_cache_metrics(self.sequences)
        return RequestStats(
            id=self.request_id,
            stage=self._stage(lead),
            context_prefill_position=min(lead.kv_len, num_prompt_tokens),
            num_generated_tokens=num_generated,
            avg_num_decoded_tokens_per_iter=num_generated / max(1, self.num_iterations),
            scheduled=was_scheduled,
            paused=self.num_unfinished > 0 and lead.num_new_tokens > 0 and not lead.block_table,
            reused_tokens_per_request=sum(s.blocks.num_reused_tokens for s in self.sequences),
            alloc_total_blocks_per_request=blocks.num_total_allocated_blocks,
            alloc_new_blocks_per_request=blocks.num_new_allocated_blocks,
            reused_blocks_per_request=blocks.num_reused_blocks,
            missed_blocks_per_request=blocks.num_missed_blocks,
            kv_cache_hit_rate_per_request=blocks.kv_cache_hit_rate,
        )

    def _stage(self, lead: Sequence) -> RequestStage:
        if self.num_unfinished == 0:
            return RequestStage.GENERATION_COMPLETE
        if not self.is_started:
            return RequestStage.QUEUED
        if lead.is_context:
            return RequestStage.CONTEXT_IN_PROGRESS
        return RequestStage.GENERATION_IN_PROGRESS
