"""Opens a TensorRT engine: its plans, our kernels between them, and the engine of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from llmctl.builder.engine_format import (
    BASE,
    TENSORRT_OP,
    EngineConfig,
    Plan,
    PlanOp,
    TrtPiece,
)
from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import CompiledKernel, uses_pdl
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.plugins.backends.tensorrt.execution import PlanSet
from llmctl.plugins.backends.tensorrt.plan_calls import PieceRunner
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.tactics import MANY, parse_tactic
from llmctl.plugins.schemes.table import find_form
from llmctl.runtime.engines.contiguous_engine import PIECE, ContiguousEngine, output_bytes
from llmctl.runtime.engines.cuda_engine import CudaEngine


def is_linear(config: EngineConfig) -> bool:
    """Whether each sequence has one slot of the cache, inside the plan (--kv_cache_type
    continuous), instead of pages that our attention reads."""
    return str(config.build_config["kv_cache_type"]).upper() == "CONTINUOUS"


def open_plans(
    plan: Plan, stored: Mapping[str, torch.Tensor], trt: Any, queue: DeviceQueue
) -> PlanSet:
    """Every plan that the engine's operators run, with scratch memory on the queue's device.

    Raises RebuildNeeded, CorruptEngine, OutOfMemory.
    """

    def allocate(num_bytes: int) -> torch.Tensor:
        with device_errors("allocating TensorRT's scratch memory"), queue.scope():
            return torch.empty(num_bytes, dtype=torch.uint8, device=queue.device)

    pieces = used_pieces(plan)
    data = {piece.name: stored[piece.tensor].numpy().tobytes() for piece in pieces}
    return PlanSet(trt, pieces, data, allocate, queue.handle)


def used_pieces(plan: Plan) -> list[TrtPiece]:
    """The plans that some operator runs; the engine may also have one for token trees."""
    used = {op.attributes.get("piece") for op in plan.ops}
    return [piece for piece in plan.trt_pieces if piece.name in used]


def open_tensorrt(
    config: EngineConfig,
    plan: Plan,
    stored: Mapping[str, torch.Tensor],
    queue: DeviceQueue,
    trt: Any,
    capability: str,
    load: Callable[[], Mapping[str, torch.Tensor]],
) -> CudaEngine:
    """The engine on the queue's device.

    `stored` has the engine file's plans and cubins, `trt` is the package, `capability` that of the
    device, `load` loads the weights; it is called last, so that what TensorRT refuses is
    refused before. Raises what `open_plans` raises.
    """
    plans = open_plans(plan, stored, trt, queue)

    def make_program(calls: list[OpCall], limits: StepLimits) -> CudaProgram:
        return CudaProgram(
            calls,
            load_binaries(plan, stored, capability),
            replace(limits, num_sms=_num_sms(queue.device)),
            queue.device,
            use_pdl=uses_pdl(capability),
            runners={TENSORRT_OP: PieceRunner(plans)},
        )

    if is_linear(config):
        return ContiguousEngine(config, plan, load(), make_program, queue, plans)
    return CudaEngine(
        config,
        plan,
        load(),
        make_program,
        queue,
        is_capturable=lambda: plans.is_capturable(queue.handle),
    )


def kernels_a_step(plan: Plan, max_tokens: int | None = None, graph: str = BASE) -> int:
    """Kernels that a step of a graph with up to `max_tokens` tokens (None: any number) launches at
    most, those within TensorRT's plans included."""
    inside = {
        piece.name: max(len(profile["layers"]) for profile in piece.profiles)
        for piece in plan.trt_pieces
    }
    dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}
    tokens = plan.max_num_tokens if max_tokens is None else max_tokens
    return sum(
        inside.get(str(op.attributes.get("piece")), _most_launches(op, dtypes, tokens))
        for op in plan.graphs[graph].ops
    )


def _most_launches(op: PlanOp, dtypes: Mapping[str, str], tokens: int) -> int:
    """Kernels of ours that an operator launches at most; dtypes: of the plan's tensors.

    Attention to chunks and to single tokens are two. A product is one, and one more each for a norm
    that it does not have in steps too large, and for weights that are codes and meet many tokens:
    their numbers are made first.
    """
    if op.op == "paged_attention":
        return 2
    is_expanded = (
        op.op.startswith("packed_linear")
        and find_form(dtypes[op.inputs["weight"]], op.attributes).is_coded
        and _reaches_many(op.tactic, tokens)
    )
    return 1 + ("norm_weight" in op.inputs) + is_expanded


def _reaches_many(tactic: str, tokens: int) -> bool:
    """Whether a step of up to so many tokens takes the product of many tokens."""
    variants = parse_tactic(tactic)
    few = max((most for most, variant in variants if variant != MANY), default=0)
    return tokens > few


def plan_scratch_bytes(plan: Plan) -> int:
    """Scratch memory of TensorRT's plans, as their builder reported it, which they share; and what
    the plan of a whole model writes beside its cache."""
    pieces = used_pieces(plan)
    profiles = [profile for piece in pieces for profile in piece.profiles]
    # A plan's activation memory includes its kernels' scratch.
    shared = max((max(p["activation_bytes"], p["scratch_bytes"]) for p in profiles), default=0)
    return shared + sum(output_bytes(piece) for piece in pieces if piece.name == PIECE)


def load_binaries(
    plan: Plan, stored: Mapping[str, torch.Tensor], capability: str
) -> list[CompiledKernel]:
    """Our kernels for a device of this compute capability."""
    return [
        CompiledKernel.from_metadata(kernel.metadata, stored[kernel.tensor].numpy().tobytes())
        for kernel in plan.kernels
        if kernel.capability in ("", capability)
    ]


def _num_sms(device: torch.device) -> int:
    """Multiprocessors that thread blocks which wait for each other may count on; no more than the
    scratch memory was planned for."""
    return min(HOPPER.num_sms, torch.cuda.get_device_properties(device).multi_processor_count)
