"""Sampling: from one row of raw logits to one token id. What every backend must agree on.

Order of transforms on a row [vocab], all in the logits domain:

1. banned ids (bad words, end_id before min_tokens) become -inf;
2. repetition, then presence, then frequency penalty, over the prompt and all output so far (as
   TensorRT-LLM counts; OpenAI's API counts presence and frequency over the output alone);
3. division by temperature;
4. top-k, top-p, min-p, with the meaning of transformers' logits warpers.

The token is argmax(processed + Gumbel noise) over the surviving ids. The noise of one id is a pure
function of (seed, absolute position of the token being drawn, id, stream), so a token does not
depend on the batch, the chunking or the draft that proposed it. Greedy rows are the argmax after
step 2. The lowest id wins ties. Without filters the cuda backend compares sums that are not
rounded, since ranks divide the vocabulary (`plain_draw` of triton_values.py).

Noise: Philox4x32-10 with key (seed low, seed high) and counter (id // 4, position, stream, 0);
word id % 4 becomes u = (word + 0.5) / 2**32, and the noise is -log(-log(u)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# float32 [rows, vocab], finite or -inf, NaN or +inf where an engine failed: a C-contiguous numpy
# array, or what a device's engine returns instead (`backends.cuda.queue.DeviceLogits`) for its own
# sampling. Both have len, shape, slices of rows and lists of row numbers. Or BestIds, where a step
# asked for them.
Logits = Any


@dataclass(frozen=True, slots=True)
class BestIds:
    """In the place of logits, of a step that wanted no more (`StepInputs.best_only`): the best id
    of each of `count` rows, as `SamplingBackend.argmax` finds it. `read` waits for it."""

    count: int
    read: Callable[[], NDArray[np.int32]]

    def __len__(self) -> int:
        return self.count


# Streams keep draws for different purposes independent at one position.
TARGET_STREAM = 0  # the emitted token; also drafts under the accept-by-tokens rule
DRAFT_STREAM = 1  # drafts whose distribution is kept (accept by logits)
ACCEPT_STREAM = 2  # the uniform of the accept test
MAX_TOP_K = 0x7FFFFFFF  # passed to kernels for "no limit": more than any vocabulary has

# Noise lies in [MIN_NOISE, MAX_NOISE] because u has 32 bits, so an id whose processed logit is
# more than NOISE_SPAN below the row's best can never win: backends may skip it.
MAX_NOISE = -math.log(-math.log1p(-0.5 / 2**32))
MIN_NOISE = -math.log(-math.log(0.5 / 2**32))
NOISE_SPAN = MAX_NOISE - MIN_NOISE


class SamplingParams(Protocol):
    """How a request draws its tokens; `runtime.request.SamplingConfig` is one."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def is_greedy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Everything besides the logits that decides the token drawn from one row.

    `counts` [vocab] int32 holds how often each id occurs in the tokens before `position` (committed
    tokens and, under verification, the drafts on the path); None when there are no penalties.
    """

    params: SamplingParams
    seed: int  # unsigned 64-bit
    position: int  # absolute position of the token being drawn
    counts: NDArray[np.int32] | None = None
    banned: tuple[int, ...] = ()
    stream: int = TARGET_STREAM


def has_penalties(params: SamplingParams) -> bool:
    """True when the row needs `counts`."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class SamplingBackend(Protocol):
    """Sampling as a backend computes it. One object serves target and draft, so that their draws
    agree to the bit. A row of logits with NaN draws -1, which is nobody's token; on a CPU, one with
    +inf does, too, unless it is greedy."""

    def argmax(self, logits: Logits) -> NDArray[np.integer[Any]]:
        """The best id of each row; the lowest id on ties."""

    def sample_rows(self, logits: Logits, rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
        """One token per row."""

    def processed_probs(self, logits: Logits, rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
        """The distribution [rows, vocab] that each row is drawn from; one-hot for a greedy row."""

    def draw_from_probs(self, probs: NDArray[np.float64], row: SamplingRow) -> int:
        """Sample from a distribution [vocab] with the row's keyed noise."""

    def uniforms(self, rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
        """One value in (0, 1) per row: u of id 0 under its (seed, position, stream)."""

    def top_log_probs(
        self, logits: Logits, count: int
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.float32]]:
        """(ids, log-probabilities) [rows, count] of the largest of each raw row, the largest first;
        the lowest id on ties. count: at most the vocabulary."""

    def log_softmax_at(self, logits: Logits, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[i]) under the raw row i."""
