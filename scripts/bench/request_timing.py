"""One streamed request of a benchmark, and when its tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request


@dataclass
class Timed:
    """One request: tokens, and when they came (seconds since it was enqueued)."""

    tokens: list[int]
    arrivals: list[tuple[float, int]]  # (time, tokens so far)
    rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    accepted: int = 0

    @property
    def total_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def decode_s_per_token(self) -> float:
        """From the first token to the last: the same steps as the counters of rounds have."""
        first, last = self.arrivals[0], self.arrivals[-1]
        return (last[0] - first[0]) / (last[1] - first[1])


def generate(executor: Executor, prompt: list[int], max_tokens: int) -> Timed:
    """One streamed request, with what the loop counted meanwhile."""
    before = executor.get_speculation_stats()
    began = perf_counter()
    request = Request(input_token_ids=tuple(prompt), max_tokens=max_tokens, streaming=True)
    request_id = executor.enqueue_request(request)
    done = Timed([], [])
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id):
            if response.error is not None:
                raise response.error
            assert response.result is not None
            done.tokens += response.result.output_token_ids
            done.arrivals.append((perf_counter() - began, len(done.tokens)))
            is_final = response.result.is_final
    after = executor.get_speculation_stats()
    done.rounds = after.rounds - before.rounds
    done.accepted = after.accepted_tokens - before.accepted_tokens
    done.draft_s = after.draft_s - before.draft_s
    done.verify_s = after.verify_s - before.verify_s
    done.host_s = after.host_s - before.host_s
    return done
