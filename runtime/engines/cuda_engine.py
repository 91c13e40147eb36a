"""Engines on a GPU: everything is in device memory, and steps are launches on one stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import EngineConfig, Plan, step_limits
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits, StepShape
from llmctl.plugins.backends.cuda.queue import DeviceLogits, DeviceQueue, device_errors
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.shares import share_of
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.gather_rows.kernel import gather
from llmctl.plugins.ops.kv_compact.kernel import compact_launch
from llmctl.plugins.ops.rank_offers.kernel import SharedLogits
from llmctl.plugins.ops.sampling.spec import BestIds, Logits
from llmctl.runtime.engines.device_cache import DeviceCache
from llmctl.runtime.engines.device_program import DeviceProgram
from llmctl.runtime.engines.engine import Engine, bind_plan, make_calls
from llmctl.runtime.engines.graphs import (
    Buckets,
    GraphCache,
    Replayable,
    capture_graph,
    capture_when,
    pad,
    shape_of,
)
from llmctl.runtime.engines.heads import BoundHead, bind_heads, find_head
from llmctl.runtime.kv_cache import Arrival, BlockCopy, BlockHolder, Move
from llmctl.runtime.step import pack_rows

Capture = Callable[[Callable[[], None]], Replayable]

LEAST_FED = 64  # tokens that `feed` pads to at least


class CudaEngine(Engine):
    """Runs a plan on the queue's device.

    `make_program` binds the operators to the compiled kernels. Steps of recurring shape are
    captured by `capture`, once `is_capturable`, and replayed. `run` does not wait; reading the
    logits does.
    """

    is_asynchronous = True
    has_rounds = True  # its steps can be captured in the graphs of rounds
    onboards_aside = True

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        weights: Mapping[str, torch.Tensor],
        make_program: Callable[[list[OpCall], StepLimits], DeviceProgram],
        queue: DeviceQueue,
        capture: Capture | None = None,
        is_capturable: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(config, plan)
        self.queue = queue
        self.is_capturable = is_capturable
        self.weight_bytes = sum(w.nbytes for w in weights.values())
        with device_errors("allocating activations"), queue.scope():
            # Zeroed, so that rows of padding never hold what no kernel wrote.
            arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=queue.device)
            num_best = plan.max_num_rows if self.shares_logits else 0
            self._best = torch.zeros(num_best, dtype=torch.int32, device=queue.device)
        queue.synchronize()
        tensors = bind_plan(plan, weights, arena)
        self._outputs = {name: tensors[tensor] for name, tensor in plan.outputs.items()}
        self.logits = tensors[plan.logits]  # [max_num_rows, vocab_size] float32
        self.program = make_program(
            make_calls(plan, tensors), step_limits(plan, config.build_config)
        )
        self._heads = {head.name: (head, self._beside(head)) for head in bind_heads(plan, tensors)}
        self._buckets = Buckets(self.program.limits)
        self._capture = partial(
            capture_when, is_capturable, capture or partial(capture_graph, queue)
        )
        self._graphs: GraphCache[StepShape] = GraphCache(self._capture)
        # A contiguous engine has slots instead.
        self._paged = {name: DeviceCache(queue, plan, name) for name in plan.caches}

    def _beside(self, head: BoundHead) -> DeviceProgram:
        """The program of a head, whose cache may have another dtype than the engine's own."""
        if not head.cache:
            return self.program.beside(head.calls, head.row_inputs)
        kv_dtype = self.plan.caches[head.cache].dtype
        return self.program.beside(head.calls, head.row_inputs, kv_dtype)

    @property
    def merges_draws(self) -> bool:
        """Whether rounds draw without filters from logits that stay with ranks."""
        return self.shares_logits and self.program.has_peers

    @property
    def head_caches(self) -> Mapping[str, BlockHolder]:
        """The caches of heads; see Engine."""
        return {name: cache for name, cache in self._paged.items() if name}

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged caches, zeroed; existing ones of that size are kept."""
        caches = self._paged.values()
        for cache in caches:
            cache.settle()
        if all(cache.is_allocated(num_blocks) for cache in caches):
            return
        self._graphs.clear()
        for cache in caches:
            cache.free()
        for cache in caches:
            cache.allocate(num_blocks)
        self.program.bind_kv_cache(self._paged[""].tensor)
        for head, program in self._heads.values():
            program.bind_kv_cache(self._paged[head.cache].tensor)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers, after everything enqueued before."""
        self._paged[""].copy_block(source, destination)

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """Pinned host memory for blocks that leave the device, of every cache."""
        for cache in self._paged.values():
            cache.allocate_host_blocks(num_blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order, after everything enqueued before; does not wait."""
        return self._paged[""].copy_blocks(copies)

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """Enqueue the moves of accepted paths, in one launch."""
        starts = np.cumsum([0, *map(len, moves)], dtype=np.int32)
        flat = np.array([move for own in moves for move in own], np.int32)
        room = -len(starts) % 4  # arrays are aligned to 16 bytes
        both = np.concatenate((starts, np.zeros(room, np.int32), flat.ravel()))
        held = self.queue.to_device(torch.from_numpy(both))
        places = held[len(starts) + room :].view(-1, 2)
        self.enqueue_moves(held[: len(starts)], places)

    def enqueue_moves(self, starts: torch.Tensor, moves: torch.Tensor) -> None:
        """Enqueue moves that are on the device; see `compact_launch`."""
        launch = compact_launch(self._paged[""].tensor, starts, moves)
        self.program.launch([launch], self.queue.handle)

    def run(self, step: StepInputs) -> Logits:
        """Enqueue one packed step; logits of step.logit_rows in that order, or their best ids."""
        shape = shape_of(step)
        bucket = self._buckets.fit(shape)
        if bucket is None:
            rounded = self._buckets.round_up(shape)
            self.program.upload(pad(step, rounded), self.queue.handle)
            self._enqueue(rounded)
        else:
            self.program.upload(pad(step, bucket), self.queue.handle)
            self._graphs.run(bucket, lambda: self._enqueue(bucket))
        if step.best_only:
            best = self._best[: step.num_rows]
            return BestIds(step.num_rows, lambda: self.queue.to_host(best).numpy())
        return DeviceLogits(self.logits[: step.num_rows], self.queue)

    def run_head(self, name: str, step: StepInputs) -> dict[str, torch.Tensor]:
        """Enqueue a head of the plan; see Engine. Its outputs are to be read on the queue."""
        head, program = find_head(self._heads, name)
        # Its tensors may have room for a few rows alone, so its tokens are not padded.
        shape = replace(self._buckets.round_up(shape_of(step)), num_tokens=step.num_tokens)
        program.upload(step, self.queue.handle)
        program.enqueue(shape, self.queue.handle)
        return head.outputs(step)

    def prepare_head(self, name: str) -> DeviceStep:
        """The arrays that `enqueue_head` reads: which rows of its inputs the head computes is
        `logit_rows`; the rest is written here."""
        _, program = find_head(self._heads, name)
        program.upload(pack_rows(self.max_num_rows, [0]), self.queue.handle)
        return program.step

    def enqueue_head(
        self, name: str, num_rows: int, *, reads_tokens: bool = False, are_listed: bool = False
    ) -> None:
        """Enqueue a head for the rows that its step names on the device; it reads those alone, or
        also a token of the step for each. are_listed: the program's `offers` alone reads its
        logits."""
        _, program = find_head(self._heads, name)
        most = num_rows if reads_tokens else self.max_num_rows
        shape = StepShape(most, 1, num_rows, most, 1, best_only=are_listed)
        program.enqueue(shape, self.queue.handle)

    def shared_logits(self, name: str, outputs: Sequence[str]) -> SharedLogits | None:
        """Logits of a head of which each rank has its own ids, where `offers` of the program
        lists the likeliest; None: every rank has them whole, or all are on one device."""
        head, program = find_head(self._heads, name)
        if not (self.plan.heads[name].is_over_ranks and program.has_peers):
            return None
        shares = [head.output(share_of(output)) for output in outputs]
        return SharedLogits.of(shares, self.vocab_size, self.config.num_ranks)

    def enqueue_attending(self, name: str, shape: StepShape) -> None:
        """Enqueue a head that attends, for a step of this shape that is on the device."""
        _, program = find_head(self._heads, name)
        program.enqueue(shape, self.queue.handle)

    def write_head(self, name: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """Enqueue copies of rows to where a head reads them."""
        head, _ = find_head(self._heads, name)
        with device_errors(f"writing the inputs of {name}"), self.queue.scope():
            head.write(inputs)

    def hand_on(self, source: str, head: str, count: int) -> None:
        """Enqueue the copy of what a head left to inputs of a head; see Engine."""
        given, taken = find_head(self._heads, source)[0], find_head(self._heads, head)[0]
        with device_errors(f"writing the inputs of {head}"), self.queue.scope():
            taken.take(given, count)

    def give_rows(
        self, head: str, name: str, sources: Sequence[torch.Tensor], rows: NDArray[np.int64]
    ) -> None:
        """Enqueue the copy of rows of outputs to an input of a head; see Engine."""
        bound, _ = find_head(self._heads, head)
        index = self.queue.to_device(torch.from_numpy(rows))
        with device_errors(f"writing the inputs of {head}"), self.queue.scope():
            bound.write_beside(name, sources, index)

    def pass_chosen(
        self, head: str, name: str, outputs: Sequence[torch.Tensor], rows: torch.Tensor
    ) -> None:
        """Enqueue the copy of rows of outputs, side by side, to an input of a head. rows: int32 on
        the device."""
        bound, _ = find_head(self._heads, head)
        parts, most = bound.side_by_side(name, outputs), len(outputs)
        copies = [each for x, part in parts for each in gather(x, rows, part, len(rows), most)]
        self.program.launch(copies, self.queue.handle)

    def pass_rows(self, head: str, name: str, outputs: Sequence[torch.Tensor], count: int) -> None:
        """Enqueue the copy of the first `count` rows of outputs, side by side, to an input of a
        head."""
        bound, _ = find_head(self._heads, head)
        with device_errors(f"writing the inputs of {head}"), self.queue.scope():
            bound.write_first(name, outputs, count)

    def as_logits(self, output: torch.Tensor) -> DeviceLogits:
        """To be read on the queue; see Engine."""
        return DeviceLogits(output, self.queue)

    def head_output(self, name: str, output: str) -> torch.Tensor:
        """Where a head leaves an output."""
        return find_head(self._heads, name)[0].output(output)

    def top_ids(self, logits: Sequence[torch.Tensor], count: int) -> NDArray[np.int64]:
        """The ids of the largest logits; see Engine."""
        with device_errors("choosing among logits"), self.queue.scope():
            found = torch.stack(list(logits)).topk(count).indices
        ids: NDArray[np.int64] = self.queue.to_host(found).numpy()
        return ids

    def top_log_probs(
        self, logits: torch.Tensor, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest ids; see Engine."""
        with device_errors("choosing among logits"), self.queue.scope():
            ids, log_probs = top_log_probs(logits, count)
        return self.queue.to_host(ids).numpy(), self.queue.to_host(log_probs).numpy()

    def prepare_prompts(self, max_num_tokens: int) -> None:
        """Prepare steps with prompts of up to so many tokens; otherwise the first step of each size
        is late, by as much as 10 ms."""
        for shape in self._buckets.prompt_shapes(max_num_tokens):
            self.program.prepare(shape)

    def feed(self, step: StepInputs) -> None:
        """Enqueue a step whose logits are not needed and whose size rarely recurs: it is padded to
        a power of two or three quarters of one, for which launches are already packed."""
        shape = self._buckets.round_up(shape_of(step))
        power = 1 << (step.num_tokens - 1).bit_length()
        wanted = 3 * power // 4 if step.num_tokens <= 3 * power // 4 else power
        wanted = max(LEAST_FED, wanted)
        shape = replace(shape, num_tokens=min(wanted, self.max_num_tokens))
        self.program.upload(pad(step, shape), self.queue.handle)
        self._enqueue(shape)

    def _enqueue(self, shape: StepShape) -> None:
        self.program.enqueue(shape, self.queue.handle)
        if shape.best_only:
            best = self.program.best_ids(self._best, shape.num_rows)
            self.program.launch([best], self.queue.handle)
