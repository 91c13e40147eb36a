"""Beam searches by a recurrent head in one C call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.backends.cpu.binding import check, load_kernels
from llmctl.plugins.backends.cpu.program import CpuProgram

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


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


@dataclass(frozen=True, slots=True)
class FoundTrees:
    """The drafts of each request: [requests, most drafts] and how many there are. parents: the
    index of the draft that each follows, -1 for the root. scores: the log-probability of the path
    to each. num_steps: of the head."""

    tokens: Ints
    parents: Ints
    scores: Floats
    counts: Ints
    num_steps: int


class CpuBeamSearch:
    """The search of runtime/drafting/redrafter/beams.py and the merging of packing.py, bit for bit,
    by a head in the CPU library. Not re-entrant."""

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

    def run(
        self,
        rows: Sequence[int],
        roots: Sequence[int],
        lengths: Sequence[int],
        rooms: Sequence[int],
        num_beams: int,
        least_kept: float,
        least_continued: float,
    ) -> FoundTrees:
        """Trees of at most `rooms` drafts behind each root; see `search` in beams.py."""
        asked = np.array((rows, roots, lengths, rooms), np.int32)
        count, width = asked.shape[1], max(0, *rooms)
        found = np.empty((2, count, width), np.int32)
        scores = np.empty((count, width), np.float32)
        counts = np.empty(count, np.int32)
        call, place = self._call, asked.__array_interface__["data"][0]
        call.num_requests, call.num_beams, call.width = count, num_beams, width
        call.rows, call.roots, call.lengths, call.rooms = range(
            place, place + 16 * count, 4 * count
        )
        call.least_kept, call.least_continued = least_kept, least_continued
        place = found.__array_interface__["data"][0]
        call.tokens, call.parents = place, place + 4 * count * width
        call.scores = scores.__array_interface__["data"][0]
        call.counts = counts.__array_interface__["data"][0]
        status = self._run(self._address)
        if status:
            check(status)
        return FoundTrees(found[0], found[1], scores, counts, call.num_steps)


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and str(tensor.dtype) == "torch.float32"
