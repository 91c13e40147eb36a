"""Rounds of ranks with a GPU each: all draft, verify and accept alike, from the same state.

Rank 0 hands on what it asks of its runner (`LeadingRounds`), and every other rank asks the same of
its own (`FollowingRounds`); what a round committed is read from rank 0's record alone. So nothing
but sums and logits goes from one GPU to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any, cast

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime.drafting.device_rows import DeviceRows
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.drafter import DeviceDrafter
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter
from llmctl.runtime.drafting.redrafter.drafter import BeamShape
from llmctl.runtime.engines.cuda_engine import Capture, CudaEngine
from llmctl.runtime.ranks.commands import ROUNDS, Command
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.request import SamplingConfig, Sequence
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.rounds import RoundReport, RoundRunner

_TARGET, _DRAFT = "target", "draft"
_DRAWN_BY = ("temperature", "top_k", "top_p", "min_p")
Described = Mapping[str, Any]


def describe(drafter: DeviceDrafter) -> Described | None:
    """What another rank makes the same drafter of; None for one whose state only rank 0 has."""
    if isinstance(drafter, NoDeviceDrafter):
        described: dict[str, Any] = {"drafter": "none"}
    elif isinstance(drafter, DeviceDraftEngine):
        described = {"drafter": "engine"}
    elif isinstance(drafter, DeviceMedusa):
        described = {"drafter": "medusa", "tree": drafter.tree.paths}
    elif isinstance(drafter, DeviceReDrafter):
        shapes = {"built": astuple(drafter.built), "shape": astuple(drafter.shape)}
        described = {"drafter": "redrafter", **shapes}
    else:
        return None
    return {**described, "draft_len": drafter.draft_len}


def _make(described: Described, engines: Mapping[str, CudaEngine]) -> DeviceDrafter:
    """The inverse."""
    kind, draft_len, target = described["drafter"], described["draft_len"], engines[_TARGET]
    if kind == "none":
        return NoDeviceDrafter()
    if kind == "engine":
        return DeviceDraftEngine(engines[_DRAFT], draft_len)
    if kind == "medusa":
        tree = MedusaTree(tuple(map(tuple, described["tree"])))
        return DeviceMedusa(target, tree, draft_len, HiddenRows())
    built, shape = (BeamShape(*described[name]) for name in ("built", "shape"))
    return DeviceReDrafter(target, built, shape, draft_len, HiddenRows())


class LeadingRounds:
    """See RoundRunner for every method."""

    def __init__(
        self, leader: Leader, runner: RoundRunner, described: Described, lengths: Items[int]
    ) -> None:
        self._leader, self._runner = leader, runner
        self.drafter = runner.drafter
        self.max_batch_size, self.max_tokens = runner.max_batch_size, runner.max_tokens
        self._lead("open", {**described, "lengths": list(lengths)}, lambda: None)

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
        state = [_state(sequence) for sequence in sequences]
        if isinstance(self.drafter, DeviceRows):
            for own, sequence in zip(state, sequences, strict=True):
                own.append(self.drafter.row_of(sequence))
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
        drafter = _make(described, self._engines)
        target, lengths = self._engines[_TARGET], tuple(described["lengths"])
        self._runner = CudaRoundRunner(target, drafter, self._capture, lengths=lengths)

    def prepare(self, sizes: tuple[int, int]) -> None:
        """See RoundRunner, as for all that follow."""
        self._own.prepare(*sizes)

    def prepare_more(self, nothing: None) -> None:
        self._own.prepare_more()

    def begin(self, state: Items[Items[Any]]) -> None:
        sequences = [_sequence(number, each) for number, each in enumerate(state)]
        drafter = self._own.drafter
        if isinstance(drafter, DeviceRows):
            for sequence, (*_, row) in zip(sequences, state, strict=True):
                drafter.note_row(sequence, row)
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
    """What a round begins with of a sequence; behind it the row that heads read first."""
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
