"""What comes back from a request. Field names are those of TensorRT-LLM's executor API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmctl.runtime.request import FinishReason

if TYPE_CHECKING:
    from llmctl.runtime.stats.request_metrics import RequestPerfMetrics


@dataclass(slots=True)  # not frozen, here and below: creating frozen ones takes five times as long
class Result:
    """Tokens of one sequence. Streaming responses contain only the new ones unless requested
    otherwise."""

    sequence_index: int
    output_token_ids: tuple[int, ...]
    is_sequence_final: bool
    is_final: bool  # the last response of the whole request
    finish_reason: FinishReason
    log_probs: tuple[float, ...] | None = None
    cum_log_prob: float | None = None
    # How the tokens were made; not part of the result itself. Steps with the request so far:
    decoding_iter: int = field(default=0, compare=False)
    request_perf_metrics: RequestPerfMetrics | None = field(default=None, compare=False)


@dataclass(slots=True)
class Response:
    """Either a result or the error that ended the request; never both."""

    request_id: int
    client_id: int | None = None
    result: Result | None = None
    error: Exception | None = None

    @property
    def has_error(self) -> bool:
        """True when the request failed or was refused."""
        return self.error is not None
