"""Engines whose plan includes the KV cache: one contiguous slot of max_seq_len positions per
sequence.

To the scheduler a slot is a block that holds a whole sequence, so nothing else changes. A plan
reads adjacent slots as its batch; so a step becomes one run for each group of adjacent slots that
read the same number of tokens (a prompt chunk is a group of its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from llmctl.builder.engine_format import EngineConfig, Plan
from llmctl.errors import OutOfMemory, Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceLogits, DeviceQueue, device_errors
from llmctl.plugins.backends.tensorrt.execution import ADDRESS_ALIGNMENT, PlanSet
from llmctl.plugins.backends.tensorrt.opened import PieceFormat
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.device_program import DeviceProgram
from llmctl.runtime.engines.engine import Engine, make_calls
from llmctl.runtime.engines.graphs import GraphCache
from llmctl.runtime.engines.slot_groups import (
    Group,
    group_requests,
    pack_arrays,
    packed_words,
    step_arrays,
)

PIECE = "whole"
_QUERY = "query_"  # outputs that exist only for their memory layout


class ContiguousEngine(CudaEngine):
    """Runs the plan of a whole model.

    A generation or verification step that is one group is captured and replayed; its inputs are at
    fixed addresses. Other steps are enqueued without capture.
    """

    has_rounds = False

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        weights: Mapping[str, torch.Tensor],
        make_program: Callable[[list[OpCall], StepLimits], DeviceProgram],
        queue: DeviceQueue,
        plans: PlanSet,
    ) -> None:
        super().__init__(
            config,
            plan,
            weights,
            make_program,
            queue,
            is_capturable=lambda: plans.is_capturable(queue.handle),
        )
        self.takes_trees = False  # its masks support only chains
        self._plans = plans
        self._slot_graphs: GraphCache[Group] = GraphCache(self._capture)
        self._most_repeated = max(self.max_draft_len + 1, 2)  # tokens a request; as Buckets
        self._bindings: tuple[Mapping[str, Any], ...] = tuple(plans.plans[PIECE].piece.bindings)
        calls = make_calls(plan, {**weights, plan.logits: self.logits})
        (call,) = [call for call in calls if call.attributes["piece"] == PIECE]
        self._fixed = {name: tensor.data_ptr() for name, tensor in call.inputs.items()}
        with device_errors("allocating activations"), queue.scope():
            self._outputs = self._allocate_outputs()
            words = packed_words(self.max_batch_size * self._most_repeated)
            self._fed = torch.zeros(words, dtype=torch.int32, device=queue.device)
        self._caches: torch.Tensor | None = None

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Slots for `num_blocks` sequences, zeroed; existing slots are kept if they suffice."""
        if self._caches is not None and self._caches.shape[2] == num_blocks:
            return
        cache = self.plan.kv_cache
        slot = (cache.num_kv_heads, cache.tokens_per_block, cache.head_size)
        dtype: torch.dtype = getattr(torch, cache.dtype)
        if math.prod(slot) * dtype.itemsize % ADDRESS_ALIGNMENT:
            raise Unsupported(
                f"a slot of {cache.tokens_per_block} positions does not end on a multiple of "
                f"{ADDRESS_ALIGNMENT} bytes, as TensorRT wants",
                fix="rebuild with a --max-seq-len that is a multiple of 16",
            )
        self._slot_graphs.clear()
        self._caches = None
        num_bytes = num_blocks * self.kv_bytes_per_block
        try:
            with device_errors("allocating the KV cache"), self.queue.scope():
                shape = (cache.num_layers, 2, num_blocks, *slot)
                self._caches = torch.zeros(shape, dtype=dtype, device=self.queue.device)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"a KV cache of {num_blocks} slots needs {num_bytes / 1e9:.2f} GB of device "
                "memory, which is not there",
                fix="lower --kv-cache-free-gpu-memory-fraction",
            ) from error

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one slot over all layers, after everything enqueued before."""
        assert self._caches is not None, "allocate_kv_cache comes first"
        with device_errors("copying a KV slot"), self.queue.scope():
            self._caches[:, :, destination].copy_(self._caches[:, :, source])

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """Raises Unsupported: a slot is a whole sequence, too large to move for a shared prefix."""
        Engine.allocate_host_blocks(self, num_blocks)

    def run(self, step: StepInputs) -> DeviceLogits:
        """Enqueue one step, group by group; logits of step.logit_rows in that order."""
        groups = group_requests(step)
        fed = [step_arrays(step, group) for group in groups]
        arrays, starts = pack_arrays(fed)
        with device_errors("running a step"), self.queue.scope():
            memory = self.queue.to_device(torch.from_numpy(arrays))
            if len(groups) == 1 and self._is_repeated(groups[0], step):
                memory = self._fed[: len(arrays)].copy_(memory)
            inputs = [
                {name: memory.data_ptr() + 4 * start for name, start in begin.items()}
                for begin in starts
            ]
            if memory.data_ptr() == self._fed.data_ptr():
                (group,) = groups
                self._slot_graphs.run(group, lambda: self._run_group(group, inputs[0], step))
            else:
                for group, addresses in zip(groups, inputs, strict=True):
                    self._run_group(group, addresses, step)
        return DeviceLogits(self.logits[: step.num_rows], self.queue)

    def _is_repeated(self, group: Group, step: StepInputs) -> bool:
        """Whether such a group recurs, with its logits in the step's order, and uses an execution
        context whose shapes no other step changes."""
        is_short = group.length <= self._most_repeated and group.is_whole(step.num_rows)
        return is_short and self._plans.keep(PIECE, group.sizes)

    def _run_group(self, group: Group, inputs: Mapping[str, int], step: StepInputs) -> None:
        sizes = group.sizes
        addresses = {**self._fixed, **inputs, **self._cache_addresses(group.first_slot)}
        addresses |= {name: tensor.data_ptr() for name, tensor in self._outputs.items()}
        is_in_place = group.is_whole(step.num_rows)
        if is_in_place:
            addresses["logits"] = self.logits.data_ptr()
        known = {}
        for binding in self._bindings:
            if binding["is_input"] and any(isinstance(dim, str) for dim in binding["shape"]):
                name, dims = binding["name"], binding["shape"]
                known[name] = tuple(sizes[d] if isinstance(d, str) else d for d in dims)
        names = [binding["name"] for binding in self._bindings]
        context = self._plans.choose(PIECE, sizes)
        context.run(known, {name: addresses[name] for name in names}, self.queue.handle)
        if group.wanted and not is_in_place:
            rows = self.queue.to_device(torch.tensor(group.wanted, dtype=torch.int64))
            self.logits.index_copy_(0, rows, self._outputs["logits"][: len(rows)])

    def _cache_addresses(self, first_slot: int) -> dict[str, int]:
        """Both caches of every layer from a slot on; an output is its input's memory."""
        assert self._caches is not None, "allocate_kv_cache comes first"
        found = {}
        for layer, pair in enumerate(self._caches):
            for kind, slots in zip("kv", pair, strict=True):
                found[f"cache_{kind}_{layer}"] = slots[first_slot].data_ptr()
        return found | {f"{name}_out": address for name, address in found.items()}

    def _allocate_outputs(self) -> dict[str, torch.Tensor]:
        """Memory for what a run writes besides the caches."""
        shapes = output_shapes(self._plans.plans[PIECE].piece)
        dtypes = {b["name"]: getattr(torch, b["dtype"]) for b in self._bindings}
        made: dict[str, torch.Tensor] = {}
        for name, (owner, shape) in shapes.items():
            if owner == name:
                made[name] = torch.zeros(shape, dtype=dtypes[name], device=self.queue.device)
            else:
                made[name] = made[owner]
        return made


def output_shapes(piece: PieceFormat) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of every output but caches: (whose memory it is, its largest shape). All layers' queries
    share the first one's memory: each is read before the next is written."""
    profiles = [profile["sizes"] for profile in piece.profiles]
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    owner = ""
    for binding in piece.bindings:
        if binding["is_input"] or binding["alias"]:
            continue
        name = binding["name"]
        if name.startswith(_QUERY):
            owner = owner or name
        whose = owner if name.startswith(_QUERY) else name
        found[name] = (whose, _largest(tuple(binding["shape"]), profiles))
    return found


def output_bytes(piece: PieceFormat) -> int:
    """Device memory of the outputs but caches."""
    sizes = {b["name"]: getattr(torch, b["dtype"]).itemsize for b in piece.bindings}
    shapes = output_shapes(piece).items()
    return sum(math.prod(shape) * sizes[n] for n, (owner, shape) in shapes if owner == n)


def _largest(dims: tuple[int | str, ...], profiles: list[Mapping[str, Any]]) -> tuple[int, ...]:
    """The largest shape of any profile."""
    shapes = []
    for sizes in profiles:
        most = {name: int(bounds[2]) for name, bounds in sizes.items()}
        most["logits_rows"] = most["batch"] * most["rows"]
        shapes.append(tuple(most[dim] if isinstance(dim, str) else dim for dim in dims))
    return max(shapes, key=math.prod)
