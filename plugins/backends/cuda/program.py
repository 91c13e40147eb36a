"""The CUDA backend's program: every call of a plan as kernel launches on one stream.

Launches are described by `plugins/ops/<op>/kernel.py`, packed once per step shape and then only
enqueued. (For all operators except attention, which also depends on requests, and gathered logits,
packed once per number of tokens.) Packing a whole step takes longer than most steps do (11 ms for
the 229 launches of an 8B model), so a call is packed for one layer and rebound for the layers like
it. Everything that differs between steps of the same shape is in the arrays of `step`, which one
copy from pinned memory fills; so a captured graph replays whatever was uploaded last.

    program.bind_kv_cache(cache)
    program.upload(step, stream)
    program.enqueue(shape, stream)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from llmctl.plugins.backends.cuda.best_ids import BestIds
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.device_kernels import DeviceKernels, Driver
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    Launch,
    LaunchEnv,
    Parts,
    Peers,
    StepLimits,
    StepShape,
    own_part,
)
from llmctl.plugins.backends.cuda.rebinding import (
    Model,
    Packed,
    Prepared,
    look,
    model_of,
    own_tensors,
)
from llmctl.plugins.backends.cuda.step_buffer import StepBuffer
from llmctl.plugins.core.calls import Extent, OpCall, StepInputs, row_extents
from llmctl.plugins.core.fused_calls import FusedCalls
from llmctl.plugins.core.operators import check_call, operator_module
from llmctl.plugins.fused.decoder_layers.kernel import chain_launches, open_chains, serves
from llmctl.plugins.ops.packed_linear import best
from llmctl.plugins.ops.rank_draw import kernel as rank_draw
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from llmctl.plugins.ops.rank_offers.kernel import SharedLogits
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch

# Step shapes, and counts of each call, whose packed launches are kept; the least recently used go.
MAX_PREPARED, MAX_COUNTS = 64, 256
_BY_SHAPE = frozenset({"paged_attention", "all_gather"})  # others by tokens or rows alone
_EXTENTS: tuple[Extent, ...] = ("tokens", "rows")
_CHAIN = -1  # in the place of an index: all calls of the first chain; -2: of the second


class OperatorRunner(Protocol):
    """Runs the calls of an operator that does not consist of llmctl's kernels (TensorRT plans)."""

    def extents(self, call: OpCall) -> Mapping[str, Extent]:
        """Whether each output, by role, has the step's tokens or its rows."""

    def prepare(self, call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Prepared]:
        """What a step of this shape enqueues for the call, in order; nothing is enqueued yet."""


class CudaProgram:
    """Runs a list of calls; their tensors, the step's arrays and scratch are in device memory.

    Raises CorruptEngine for a call that breaks its spec or a kernel that is missing. Not
    re-entrant: one thread at a time, and the stream it is given is always the same.
    """

    def __init__(
        self,
        calls: Sequence[OpCall],
        binaries: Iterable[CompiledKernel] | DeviceKernels,
        limits: StepLimits,
        device: torch.device | str = "cuda",
        driver: Driver | None = None,
        use_pdl: bool = True,
        runners: Mapping[str, OperatorRunner] | None = None,
        fused: Sequence[FusedCalls] = (),
        row_inputs: Sequence[torch.Tensor] = (),
        parts: Parts = own_part,
        peers: Peers | None = None,
    ) -> None:
        """row_inputs: tensors that are there before the first call and have the step's rows. parts:
        of other ranks, whose kernels run on the same stream; peers: those that have a device each.
        """
        self._runners = dict(runners or {})  # by operator
        stated = {}
        for call in calls:
            if call.op in self._runners:
                stated[call.name] = self._runners[call.op].extents(call)
            else:
                check_call(call)
        self.limits = limits
        if isinstance(binaries, DeviceKernels):
            self._kernels = binaries
        else:
            self._kernels = DeviceKernels(binaries, torch.device(device), driver, use_pdl)
        self._driver = self._kernels.driver
        self.scratch = self._kernels.scratch  # see LaunchEnv
        self._calls = tuple(zip(calls, row_extents(calls, stated, row_inputs), strict=True))
        own = {call.op for call in calls} - set(self._runners)
        self._modules = {op: operator_module(op, "kernel") for op in own}
        self._inputs = StepBuffer(limits, self._kernels.device, self._driver)
        self.step: DeviceStep = self._inputs.step
        self._envs: dict[str, LaunchEnv] = {}
        self._prepared: OrderedDict[StepShape, list[Packed]] = OrderedDict()
        self._by_count: list[OrderedDict[Hashable, Packed]] = [OrderedDict() for _ in calls]
        self._best = BestIds(call for call in calls if call.op in own)
        self._looks = [
            look(*each, self._modules[each[0].op]) if each[0].op in own else None
            for each in self._calls
        ]
        self._models: dict[Hashable, Model] = {}  # by `look`, for the step packed last
        self._chains = open_chains(calls, limits, fused)
        self._parts, self._peers = parts, peers

    def beside(
        self,
        calls: Sequence[OpCall],
        row_inputs: Sequence[torch.Tensor] = (),
        kv_dtype: str = "",
    ) -> CudaProgram:
        """A program of other calls of the engine: it shares the kernels and their scratch memory,
        and has arrays of a step for itself. It runs on this program's stream. kv_dtype: of its KV
        cache, if it is not this program's."""
        limits = replace(self.limits, kv_dtype=kv_dtype) if kv_dtype else self.limits
        given = calls, self._kernels, limits
        return CudaProgram(*given, row_inputs=row_inputs, parts=self._parts, peers=self._peers)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Use this cache from now on; captured graphs keep the one they were captured with."""
        assert kv_cache.dim() == 6 and kv_cache.is_contiguous()
        self.forget()
        self._envs = {
            extent: LaunchEnv(
                *(self.step, kv_cache, self.limits, extent),
                self.scratch,
                self._kernels.use_pdl,
                self._parts,
                self._peers,
            )
            for extent in _EXTENTS
        }
        self._best.reserve(self._envs["rows"])

    def forget(self) -> None:
        """Describe and pack all launches again from now on, because other kernels may be chosen."""
        self._prepared.clear()
        self._models.clear()
        for kept in self._by_count:
            kept.clear()

    def upload(self, step: StepInputs, stream: int) -> None:
        """Enqueue one copy of the step's arrays into `self.step`."""
        self._driver.make_current()
        self._inputs.upload(step, stream)

    def enqueue(self, shape: StepShape, stream: int) -> None:
        """Enqueue every launch of a step of this shape, also while the stream is captured.

        The first time for a shape may allocate scratch, which a capture must not: launch a shape
        once before it is captured.
        """
        self._driver.make_current()
        found = self._prepared.get(shape)
        if found is not None:
            self._prepared.move_to_end(shape)
            for packed in found:
                packed.enqueue(stream)
            return
        assert self._envs, "bind_kv_cache comes first"
        steps = []
        for index in self.parts(shape):  # the device starts while the remaining calls are packed
            packed = self._pack(index, shape)
            packed.enqueue(stream)
            steps.append(packed)
        self._prepared[shape] = steps
        if len(self._prepared) > MAX_PREPARED:
            self._prepared.popitem(last=False)

    def prepare(self, shape: StepShape) -> None:
        """Pack in advance what steps of so many tokens and rows launch, except `_BY_SHAPE`."""
        self._driver.make_current()
        for index, (call, _) in enumerate(self._calls):
            if call.op not in _BY_SHAPE and call.op not in self._runners:
                self._pack(index, shape)

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        """Enqueue launches that belong to no call: rounds and sampling."""
        self._driver.make_current()
        for launch in launches:
            self._kernels.prepare(launch)(stream)

    def best_ids(self, out: torch.Tensor, rows: int, *, stride: int = 1, offset: int = 0) -> Launch:
        """out[r * stride + offset] = the best id of each row of the last step, which wanted no more
        (`StepShape.best_only`) and was of ranks or `keeps_best`; see `sampling.argmax`."""
        return self._best.launch(self._envs["rows"], out, rows, stride=stride, offset=offset)

    def keeps_best(self, rows: int) -> bool:
        """Whether a step of so many rows, with `best_only`, stores no logits on this one rank."""
        return self._best.are_kept(rows)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, with a device each."""
        return self._peers is not None

    def best_draws(
        self, out: torch.Tensor, scratch: SamplingScratch, rows: DrawnRows
    ) -> list[Launch]:
        """The same for draws without filters, where the program `has_peers`; see
        `rank_draw.launches`."""
        assert self._peers is not None and self._best.gathering, "ranks on one device gather"
        return rank_draw.launches(self._best.gathering, self._peers, out, scratch, rows)

    def offers(
        self,
        logits: SharedLogits,
        keys: torch.Tensor,
        sums: torch.Tensor | None,
        rows: int,
        count: int,
    ) -> Launch:
        """The likeliest ids of logits of heads that a step left with the ranks, where the program
        `has_peers`; see `rank_offers.launch`."""
        assert self._peers is not None, "ranks on one device gather"
        return rank_offers.launch(logits, self._peers, keys, sums, rows, count)

    def parts(self, shape: StepShape) -> list[int]:
        """The calls to launch one by one; a chain is represented by _CHAIN minus its number."""
        parts = list(range(len(self._calls)))
        for number, chain in enumerate(self._chains):
            if serves(chain, self._envs["tokens"], shape):
                parts[chain.start : chain.stop] = [_CHAIN - number]
                break
        return parts

    def _pack(self, index: int, shape: StepShape) -> Packed:
        """What a call launches in a step of this shape; nothing is enqueued yet."""
        if index <= _CHAIN:
            given = self._chains[_CHAIN - index], self._chains, self._envs["tokens"], shape
            return self._prepared_of(chain_launches(*given))
        call, extent = self._calls[index]
        env = self._envs[extent]
        if call.op in self._runners:
            return Packed(self._runners[call.op].prepare(call, env, shape), [])
        if call.op in _BY_SHAPE:
            return self._pack_like(index, shape, shape)
        count = env.count(shape)
        kept, is_best = self._by_count[index], shape.best_only and call is self._best.product
        if (count, is_best) in kept:
            kept.move_to_end((count, is_best))
            return kept[count, is_best]
        packed = Packed([], [])
        if is_best:
            packed = self._prepared_of(best.best_launches(call, env, count))
        elif count:  # a prompt's chunk other than the last has no rows of logits
            packed = self._pack_like(index, shape, count)
        kept[count, is_best] = packed
        if len(kept) > MAX_COUNTS:
            kept.popitem(last=False)
        return packed

    def _pack_like(self, index: int, shape: StepShape, packed_for: Hashable) -> Packed:
        """Rebind a similar call that was packed for the same shape, if there is one."""
        seen = self._looks[index]
        if seen is None:
            return self._pack_new(index, shape)
        call, extent = self._calls[index]
        own = own_tensors(call, self._envs[extent], self._modules[call.op])
        model = self._models.get(seen)
        if model is None or model.packed_for != packed_for:
            model = model_of(packed_for, self._pack_new(index, shape), own)
            self._models[seen] = model
            return model.packed
        if model.places is None:
            return self._pack_new(index, shape)
        rebound = [
            self._driver.rebind(each, {at: own[number] for at, number in places.items()})
            for each, places in zip(model.packed.prepared, model.places, strict=True)
        ]
        return Packed(rebound, model.packed.launches)

    def _pack_new(self, index: int, shape: StepShape) -> Packed:
        call, extent = self._calls[index]
        return self._prepared_of(self._modules[call.op].launches(call, self._envs[extent], shape))

    def _prepared_of(self, launches: list[Launch]) -> Packed:
        return Packed([self._kernels.prepare(launch) for launch in launches], launches)
