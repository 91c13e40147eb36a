"""A user's requests and the sequences that a step runs; `response.py` has the results.

Plain data, no tensors and no policy. Field names are those of TensorRT-LLM's executor API, in
snake_case.
"""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from llmctl.errors import BadConfig, LlmctlError
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types
from llmctl.runtime.api.retention import KvCacheRetentionConfig

if TYPE_CHECKING:
    from llmctl.builder.engine_format import LookaheadDecodingConfig


class FinishReason(enum.Enum):
    """Why a sequence ended; NOT_FINISHED while it runs."""

    NOT_FINISHED = "not_finished"
    END_ID = "end_id"
    STOP_WORDS = "stop_words"
    LENGTH = "length"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@refused.refuses()
@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Typical acceptance of drafts (Cai et al. 2024, arXiv:2401.10774), which changes the text: a
    draft of probability p is kept where p > min(threshold, alpha * exp(-entropy)) under the
    target's own distribution. The defaults are those of the published code."""

    threshold: float = 0.09  # the paper's epsilon
    alpha: float = 0.3  # the paper's delta

    def __post_init__(self) -> None:
        check_types(self)
        _require(0 < self.threshold <= 1, "typical threshold", self.threshold, "in (0, 1]")
        _require(0 < self.alpha <= 1, "typical alpha", self.alpha, "in (0, 1]")


MOST_SEQUENCES = 1 << 16  # of one request: each has state from the start
MOST_PENALTY = 1e6  # times any count and any logit it is a finite float32


@refused.refuses(refused.SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the next token is drawn. If top_k and top_p are both unset, or temperature is 0, it is
    greedy.

    top_k 0 means no limit. Penalties and no_repeat_ngram_size count the prompt and everything
    generated so far.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # no sequence of so many tokens occurs twice; 0: no limit
    min_tokens: int = 0  # before this many new tokens, end ids are banned and stop words ignored
    num_return_sequences: int = 1  # sequence i samples with seed + i
    # Lossy, and for drafts of sampled requests alone; None: a draft never changes the text.
    typical_acceptance: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), name, value, "finite")
        _require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _require(self.top_k is None or self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 = no limit)")
        _require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "an unsigned 64-bit integer")
        factor, least = self.repetition_penalty, 1 / MOST_PENALTY
        wanted = f"> 0: from {least:g} to {MOST_PENALTY:g}"
        _require(least <= factor <= MOST_PENALTY, "repetition_penalty", factor, wanted)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            wanted = f"from {-MOST_PENALTY:g} to {MOST_PENALTY:g}"
            _require(abs(value) <= MOST_PENALTY, name, value, wanted)
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, ">= 0")
        ngram = self.no_repeat_ngram_size
        _require(ngram >= 0, "no_repeat_ngram_size", ngram, ">= 0 (0 = off)")
        count = self.num_return_sequences
        wanted = f">= 1, at most {MOST_SEQUENCES}"
        _require(1 <= count <= MOST_SEQUENCES, "num_return_sequences", count, wanted)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the argmax of the penalised logits."""
        no_filter = self.top_k is None and self.top_p is None and self.min_p == 0
        return self.temperature == 0 or self.top_k == 1 or no_filter

    @property
    def accepts_typical(self) -> bool:
        """True where drafts may change the tokens, by typical acceptance."""
        return self.typical_acceptance is not None and not self.is_greedy


@refused.refuses(refused.OUTPUT)
@dataclass(frozen=True, slots=True)
class OutputConfig:
    """What a result carries besides the tokens."""

    return_log_probs: bool = False  # log-softmax of the raw target logits, per new token
    exclude_input_from_output: bool = True
    return_all_generated_tokens: bool = False  # streaming: the whole output each time
    return_perf_metrics: bool = False  # with the final result

    def __post_init__(self) -> None:
        check_types(self)


@refused.refuses(refused.REQUEST)
@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. Stop and bad words are lists of token ids; the tokens of a stop word are kept in
    the output. An end_id of -1 means none. further_end_ids: of a model that has several; each ends
    an output as end_id does."""

    input_token_ids: tuple[int, ...]
    max_tokens: int
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    streaming: bool = False
    end_id: int | None = None
    further_end_ids: tuple[int, ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    client_id: int | None = None
    allotted_time_ms: float | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    max_draft_len: int | None = None  # the most drafts per round; None: the executor decides
    priority: float = 0.5  # 0 to 1: higher starts earlier and is paused later
    lookahead_config: LookaheadDecodingConfig | None = None  # None: the executor's

    def __post_init__(self) -> None:
        check_types(self)
        if self.end_id == -1:
            object.__setattr__(self, "end_id", None)
        _require(self.end_id is None or self.end_id >= 0, "end_id", self.end_id, ">= -1")
        _require(len(self.input_token_ids) > 0, "input_token_ids", "empty", "at least one token")
        _require(self.max_tokens > 0, "max_tokens", self.max_tokens, "> 0")
        least = self.sampling_config.min_tokens
        wanted = f"at most max_tokens, which is {self.max_tokens}"
        _require(least <= self.max_tokens, "min_tokens", least, wanted)
        most = self.max_draft_len
        _require(most is None or most >= 0, "max_draft_len", most, ">= 0")
        _require(0 <= self.priority <= 1, "priority", self.priority, "from 0 to 1")
        time_ms = self.allotted_time_ms
        _require(time_ms is None or time_ms > 0, "allotted_time_ms", time_ms, "> 0")
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            _require(all(words), name, "an empty word", "token-id lists of at least one token")

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end an output."""
        return self.further_end_ids if self.end_id is None else (self.end_id, *self.further_end_ids)

    def without_window(self) -> Request:
        """The same request for an executor without lookahead decoding, which refuses windows."""
        return replace(self, lookahead_config=None)


@dataclass(slots=True)
class BlockCounts:
    """KV blocks of a sequence over its life. A lookup after a pause counts again."""

    num_new: int = 0  # allocated to write: computed, or copied from a partly matching block
    num_shared: int = 0  # full blocks found in the cache
    num_reused: int = 0  # found, including partial matches
    num_missed: int = 0  # looked up and not found
    num_reused_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one returned sequence, equal to itself alone; cancelling releases everything it
    refers to.

    `tokens` is prompt + committed output. `kv_lens` counts the valid KV entries in each cache
    group, and `kv_len` those of the first group, the target's. A sequence in generation has kv_len
    == len(tokens) - 1 (the last token, the root of the next round, is not in the cache yet). With
    fewer entries there is context work left: a new prompt, or a paused sequence that recomputes its
    context.
    """

    sequence_id: int
    request_id: int
    request: Request
    index: int  # which of num_return_sequences
    tokens: list[int]
    num_prompt_tokens: int
    max_len: int  # the most tokens: prompt + max_tokens, limited by max_seq_len
    context_end: int = 0  # attention of the tokens before has FP8 products (fp8_context.py)
    kv_lens: list[int] = field(default_factory=lambda: [0])  # valid entries in each cache group
    block_table: list[int] = field(default_factory=list)
    blocks: BlockCounts = field(default_factory=BlockCounts)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    error: LlmctlError | None = None  # of a sequence that failed alone, whose request fails with it
    # tokens[:num_prompt_tokens] for numpy, which what only parses a request should not import
    prompt_ids: array[int] | None = field(default=None, repr=False)  # int32; see `pack_prompt`

    def pack_prompt(self) -> array[int]:
        """`prompt_ids`, made now if nobody has asked for them yet."""
        if self.prompt_ids is None:
            self.prompt_ids = array("i", self.tokens[: self.num_prompt_tokens])
        return self.prompt_ids

    def fail(self, error: LlmctlError) -> None:
        """End without further tokens, while the other sequences of the step go on."""
        self.error, self.finish_reason = error, FinishReason.CANCELLED

    @property
    def kv_len(self) -> int:
        """Valid entries in the target's cache."""
        return self.kv_lens[0]

    @kv_len.setter
    def kv_len(self, num_tokens: int) -> None:
        self.kv_lens[0] = num_tokens

    @property
    def seed(self) -> int:
        """The seed of this sequence's random draws."""
        return (self.request.sampling_config.seed + self.index) % 2**64

    @property
    def num_new_tokens(self) -> int:
        """Committed output tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_context(self) -> bool:
        """True while more than the root token has to be added to the cache."""
        num_tokens = len(self.tokens)
        return self.kv_lens[0] < num_tokens - 1 or num_tokens == self.num_prompt_tokens


class Slice(NamedTuple):
    """What one step computes for one sequence.

    Tokens tokens[start : start + num_tokens] are added to the cache, then up to `draft_len`
    proposed tokens. `needs_logits` is false only for a context chunk that is not the last one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    draft_len: int = 0  # the most draft tokens that blocks and limits allow in this round

    @property
    def needs_logits(self) -> bool:
        """True when this slice reaches the end of the committed tokens."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: context slices first, generation slices after (the packed row order)."""

    context: tuple[Slice, ...] = ()
    generation: tuple[Slice, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices in packed row order."""
        return self.context + self.generation


def _require(condition: bool, name: str, found: object, wanted: str) -> None:
    if not condition:
        raise BadConfig(f"{name} is {found}; it must be {wanted}")
