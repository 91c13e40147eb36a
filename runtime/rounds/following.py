"""Device rounds of several ranks, a GPU each: all draft, verify and accept from equal state.

Rank 0 forwards the calls of its round runner (`LeadingRounds`), and every other rank makes the same
calls of its own (`FollowingRounds`); what a round committed is read from rank 0's record alone. So
only sums and logits are exchanged between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from llmctl.runtime.drafting.drafter import Described, FollowedDrafter
from llmctl.runtime.drafting.methods import follow
from llmctl.runtime.engines.cuda_engine import Capture, CudaEngine
from llmctl.runtime.engines.opening import TARGET
from llmctl.runtime.ranks.commands import ROUNDS, Command
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.request import SamplingConfig, Sequence
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.rounds import RoundReport, RoundRunner

_DRAWN_BY = ("temperature", "top_k", "top_p", "min_p")


class LeadingRounds:
    """See RoundRunner for every method. followed: the runner's drafter."""

    def __init__(
        self, leader: Leader, runner: RoundRunner, followed: FollowedDrafter, lengths: Items[int]
    ) -> None:
        self._leader, self._runner, self._followed = leader, runner, followed
        self.drafter = runner.drafter
        self.max_batch_size, self.max_tokens = runner.max_batch_size, runner.max_tokens
        self._lead("open", {**followed.describe(), "lengths": list(lengths)}, lambda: None)

    def can_run(self, sequence: Sequence) -> bool:
        """As on one GPU."""
        return self._runner.can_run(sequence)

    def prepare(self, max_batch_size: int, max_num_tokens: int) -> None:
        """On every rank."""
        sizes = (max_batch_size, max_num_tokens)
        self._lead("prepare", sizes, lambda: self._runner.prepare(*sizes))

    def prepare_more(self) -> bool:
        """On every rank, which all have the same left."""
        found: list[bool] = []
        self._lead("prepare_more", None, lambda: found.append(self._runner.prepare_more()))
        return found[0]

    @property
    def num_captured(self) -> int:
        """Rank 0's."""
        return self._runner.num_captured

    def begin(self, sequences: Items[Sequence]) -> None:
        """On every rank."""
        state = [[*_state(each), self._followed.start_of(each)] for each in sequences]
        self._lead("begin", state, lambda: self._runner.begin(sequences))

    def enqueue(self, block_tables: Items[Items[int]], draft_len: int) -> None:
        """On every rank."""
        given = (list(map(list, block_tables)), draft_len)
        self._lead("enqueue", given, lambda: self._runner.enqueue(block_tables, draft_len))

    def collect(self) -> RoundReport:
        """Rank 0's record."""
        return self._runner.collect()

    def abandon(self) -> None:
        """On every rank, while there are others."""
        if self._leader.failure is None:
            self._lead("abandon", None, self._runner.abandon)
        else:
            self._runner.abandon()

    def _lead(self, call: str, argument: Any, method: Callable[[], None]) -> None:
        self._leader.lead(Command(ROUNDS, call, argument), method)


class FollowingRounds:
    """Executes the commands of LeadingRounds, on engines by role."""

    def __init__(self, engines: Mapping[str, CudaEngine], capture: Capture | None = None) -> None:
        self._engines, self._capture = engines, capture
        self._runner: CudaRoundRunner | None = None

    def open(self, described: Described) -> None:
        """A runner in place of the one before."""
        self._drafter = follow(described, self._engines)
        target, lengths = self._engines[TARGET], tuple(described["lengths"])
        self._runner = CudaRoundRunner(target, self._drafter, self._capture, lengths=lengths)

    def prepare(self, sizes: tuple[int, int]) -> None:
        """See RoundRunner, as for all that follow."""
        self._own.prepare(*sizes)

    def prepare_more(self, nothing: None) -> None:
        self._own.prepare_more()

    def begin(self, state: Items[Items[Any]]) -> None:
        sequences = [_sequence(number, each) for number, each in enumerate(state)]
        for sequence, (*_, start) in zip(sequences, state, strict=True):
            self._drafter.note_start(sequence, start)
        self._own.begin(sequences)

    def enqueue(self, given: tuple[list[list[int]], int]) -> None:
        tables, draft_len = given
        self._own.enqueue(tables, draft_len)
        self._own.forget()

    def abandon(self, nothing: None) -> None:
        self._own.abandon()

    @property
    def _own(self) -> CudaRoundRunner:
        assert self._runner is not None, "open comes first"
        return self._runner


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The length of a sequence, and its last two tokens."""

    count: int
    last: tuple[int, int]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> int:
        return self.last[at]


def _state(sequence: Sequence) -> list[Any]:
    """What a round begins with of a sequence; behind it what its drafter adds."""
    tokens, params = sequence.tokens, sequence.request.sampling_config
    last = [int(tokens[-2]), int(tokens[-1])]
    drawn_by = [getattr(params, name) for name in _DRAWN_BY]
    return [len(tokens), last, sequence.max_len, sequence.seed, drawn_by]


def _sequence(number: int, state: Items[Any]) -> Sequence:
    """The inverse, as far as a round asks."""
    count, (previous, root), max_len, seed, drawn_by = state[:5]
    params = SamplingConfig(**dict(zip(_DRAWN_BY, drawn_by, strict=True)))
    return cast(
        Sequence,
        SimpleNamespace(
            sequence_id=number,
            tokens=_Tokens(count, (previous, root)),
            max_len=max_len,
            seed=seed,
            request=SimpleNamespace(sampling_config=params),
        ),
    )
