"""Beam searches by a recurrent head in one C call each."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmctl.plugins.backends.cpu.binding import check, load_kernels
from llmctl.plugins.backends.cpu.program import CpuProgram

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall


class _HandedRows(ctypes.Structure):
    """HandedRows of abi.h."""

    _fields_ = [
        ("from_first", c_void_p),
        ("from_next", c_void_p),
        ("to", c_void_p),
        ("row_bytes", c_int64),
    ]


class _BeamSearch(ctypes.Structure):
    """BeamSearch of abi.h."""

    _fields_ = [
        ("first", c_void_p),
        ("next", c_void_p),
        ("first_rest", c_void_p),
        ("next_rest", c_void_p),
        ("first_logits", c_void_p),
        ("next_logits", c_void_p),
        ("handed", _HandedRows * 2),
        ("vocab_size", c_int64),
        ("first_rows", c_int32),
        ("next_rows", c_int32),
        ("num_requests", c_int32),
        ("num_beams", c_int32),
        ("rows", c_void_p),
        ("roots", c_void_p),
        ("lengths", c_void_p),
        ("rooms", c_void_p),
        ("least_kept", c_float),
        ("least_continued", c_float),
        ("width", c_int32),
        ("num_steps", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("counts", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """A graph of a recurrent head. logits [rows, vocab_size] float32, states [rows, width] each:
    its outputs, at their full sizes, which nothing may move. rest: what of the graph is only for a
    next step, and comes last."""

    program: CpuProgram
    rest: CpuProgram | None
    logits: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(
        calls: Sequence[OpCall],
        row_inputs: Sequence[torch.Tensor],
        logits: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
    ) -> HeadGraph:
        """From its operators in order."""
        last = [tensor.data_ptr() for tensor in calls[-1].outputs.values()]
        if last != [states[1].data_ptr()]:
            return HeadGraph(CpuProgram(calls, row_inputs), None, logits, states)
        rest = CpuProgram(calls[-1:], tuple(calls[-1].inputs.values())[:1])
        return HeadGraph(CpuProgram(calls[:-1], row_inputs), rest, logits, states)


class AskedBeams(NamedTuple):
    """A search for at least one request. Of each: `rows` of the target's last step; `roots`, the
    tokens that were drawn from them; `lengths` of beams, at least 1; `rooms`, the most drafts.
    Below the two scores a draft is left out, or a beam ends."""

    rows: Sequence[int]
    roots: Sequence[int]
    lengths: Sequence[int]
    rooms: Sequence[int]
    num_beams: int
    least_kept: float
    least_continued: float


class FoundTree(NamedTuple):
    """The drafts of a request. parents: the index of the draft that each follows, -1 for the root.
    scores: the log-probability of the path to each."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


class CpuBeamSearch:
    """The search of runtime/drafting/redrafter/beams.py and the merging of packing.py, bit for bit,
    by a head in the CPU library. Not re-entrant: of a search that was begun the end comes first.
    num_steps: of the head, in the last search."""

    def __init__(
        self, first: HeadGraph, following: HeadGraph, given: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """given: the inputs of `following` that the states of the step before are copied to."""
        for graph in (first, following):
            assert graph.logits.shape[1] == first.logits.shape[1] and _is_float32(graph.logits)
        self._keep = (first, following, given)
        call = _BeamSearch(
            first=first.program.handle,
            next=following.program.handle,
            first_rest=first.rest.handle if first.rest is not None else None,
            next_rest=following.rest.handle if following.rest is not None else None,
            first_logits=first.logits.data_ptr(),
            next_logits=following.logits.data_ptr(),
            vocab_size=first.logits.shape[1],
            first_rows=min(len(first.logits), *map(len, (*first.states, *given))),
            next_rows=min(len(following.logits), *map(len, (*following.states, *given))),
        )
        handed = zip(first.states, following.states, given, strict=True)
        for index, (one, other, target) in enumerate(handed):
            assert one.dtype == other.dtype == target.dtype
            assert one.shape[1] == other.shape[1] == target.shape[1]
            assert one.is_contiguous() and other.is_contiguous() and target.is_contiguous()
            row_bytes = target.shape[1] * target.element_size()
            call.handed[index] = _HandedRows(
                one.data_ptr(), other.data_ptr(), target.data_ptr(), row_bytes
            )
        self._call = call
        self._address = ctypes.addressof(call)
        self._run = load_kernels().llmctl_search_beams
        self._begin = load_kernels().llmctl_search_begin
        self._end = load_kernels().llmctl_search_end
        self._ints = np.empty(0, np.int32)
        self._scores = np.empty(0, np.float32)
        self._shape = (0, 0)  # requests, and the most drafts of one
        self._begun: list[int] = []  # a search that another thread may be at
        # Its memory is not to go while one is under way.
        weakref.finalize(self, _end_all, self._begun, self._end, self._keep)

    @property
    def num_steps(self) -> int:
        return int(self._call.num_steps)

    def run(self, asked: AskedBeams) -> list[FoundTree]:
        """The trees, of at most `rooms` drafts each; see `search` in beams.py."""
        self._ask(asked)
        status = self._run(self._address)
        if status:
            check(status)
        return self._found()

    def begin(self, asked: AskedBeams) -> bool:
        """Have another thread begin what `run` does; False: none has time. If it does, neither the
        target nor the head may run before `end`."""
        self._ask(asked)
        begun = self._begin(self._address)
        if begun:
            self._begun.append(begun)
        return bool(begun)

    def end(self) -> list[FoundTree]:
        """What was begun, as `run` returns it; by this thread, if no other has begun."""
        status = self._end(self._begun.pop())
        if status:
            check(status)
        return self._found()

    def _ask(self, asked: AskedBeams) -> None:
        assert not self._begun, "the end of what was begun comes first"
        rows, roots, lengths, rooms, num_beams, least_kept, least_continued = asked
        call, count, width = self._call, len(rows), max(0, *rooms)
        if self._shape != (count, width):
            self._make_room(count, width)
        self._ints[: 4 * count] = (*rows, *roots, *lengths, *rooms)
        call.num_beams = num_beams
        call.least_kept, call.least_continued = least_kept, least_continued

    def _make_room(self, count: int, width: int) -> None:
        """Arrays for what is asked and found, of which the library knows the addresses."""
        call, self._shape = self._call, (count, width)
        self._ints = np.empty(5 * count + 2 * count * width, np.int32)
        self._scores = np.empty(count * width, np.float32)
        place = self._ints.ctypes.data
        places = range(place, place + 24 * count, 4 * count)
        call.rows, call.roots, call.lengths, call.rooms, call.counts, call.tokens = places
        call.parents = call.tokens + 4 * count * width
        call.scores = self._scores.ctypes.data
        call.num_requests, call.width = count, width

    def _found(self) -> list[FoundTree]:
        count, width = self._shape
        ints, scores = self._ints[4 * count :].tolist(), self._scores.tolist()
        tokens, parents = ints[count:], ints[count + count * width :]
        places = range(0, count * width, width) if width else [0] * count
        return [
            FoundTree(tokens[at : at + own], parents[at : at + own], scores[at : at + own])
            for at, own in zip(places, ints, strict=False)
        ]


def _end_all(begun: list[int], end: Callable[[int], int], keep: object) -> None:
    while begun:
        end(begun.pop())


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and str(tensor.dtype) == "torch.float32"
