"""Engines of TensorRT's backends executed on the CPU: plans by the evaluator, our operators between
them by their references. What is compared with it is the same checkpoint built for the cpu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import TENSORRT_OP, Plan
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.tensorrt.networks import PieceNetwork, build_networks
from llmctl.builder.tensorrt.package import open_package
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
from support.tensorrt.evaluator import Evaluator
from support.tensorrt.evaluator.walk import evaluate_together

LIMITS = {
    "max_batch_size": 4,
    "max_seq_len": 96,
    "max_num_tokens": 64,
    "max_draft_len": 4,
    "tokens_per_block": 16,
}
NUM_BLOCKS = 24
_NUMPY_TYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as numpy sees it, narrow floats included."""
    if tensor.dtype in _BITS:
        return tensor.view(_BITS[tensor.dtype]).numpy().view(_NUMPY_TYPES[tensor.dtype])
    return tensor.numpy()


def plan_engine(checkpoint: Path, backend: str, **options: Any) -> EnginePlan:
    """An engine decided for a backend, nothing compiled."""
    fields = {**LIMITS, **options}
    plugins = fields.pop("plugins", None)
    capability = "8.9" if backend == "tensorrt-rtx" else None
    return plan_build(
        checkpoint,
        BuildRequest(**fields),
        backend=backend,
        compute_capability=capability,
        plugins=plugins,
        with_binaries=False,
    )


def networks_of(engine: EnginePlan) -> dict[str, PieceNetwork]:
    """The networks that would be compiled."""
    trt = open_package(engine.config.backend).trt
    return build_networks(engine.pieces, engine.limits, engine.config.plugin_config, trt)


def weights_of(engine: EnginePlan, rank: int = 0) -> dict[str, torch.Tensor]:
    """What the engine file of a rank would store."""
    shard = engine.shards[rank]
    return {name: torch.cat(list(s.chunks(shard))) for name, s in engine.sources.items()}


@dataclass
class Bound:
    """A plan with its tensors, as the runtime binds them, and a cache."""

    plan: Plan
    tensors: dict[str, torch.Tensor]
    kv_cache: torch.Tensor
    run: Callable[[StepInputs, torch.Tensor], None]
    calls: list[OpCall]

    def logits(self, step: StepInputs) -> np.ndarray:
        """Run one step: [rows, vocab] float32."""
        self.run(step, self.kv_cache)
        return self.tensors[self.plan.logits][: step.num_rows].numpy().copy()


def bind(
    engine: EnginePlan, make_program: Callable[[list[OpCall], EnginePlan], Any], rank: int = 0
) -> Bound:
    """Bind an engine to an arena in which everything is NaN: reading what nobody wrote shows."""
    plan = engine.plan
    arena = torch.full((plan.arena_bytes + 256,), 0xFF, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 256 :]
    tensors = bind_plan(plan, weights_of(engine, rank), arena)
    dtype = getattr(torch, plan.kv_cache.dtype)
    cache = torch.zeros(kv_cache_shape(plan, NUM_BLOCKS), dtype=dtype)
    calls = make_calls(plan, tensors)
    return Bound(plan, tensors, cache, make_program(calls, engine).run, calls)


def bind_reference(checkpoint: Path, **options: Any) -> Bound:
    """The cpu engine of a checkpoint on the reference backend."""
    engine = plan_engine(checkpoint, "cpu", **options)
    return bind(engine, lambda calls, _: ReferenceProgram(calls))


def bind_evaluated(
    checkpoint: Path, backend: str = "tensorrt-rtx", **options: Any
) -> tuple[Bound, dict[str, PieceNetwork]]:
    """(the TensorRT engine of a checkpoint, its plans evaluated, and their networks)."""
    engine = plan_engine(checkpoint, backend, **options)
    networks = networks_of(engine)
    return bind(engine, lambda calls, _: EvaluatedProgram(calls, networks)), networks


class EvaluatedProgram:
    """A TensorRT engine's operators in order."""

    def __init__(self, calls: list[OpCall], networks: Mapping[str, PieceNetwork]) -> None:
        self._calls = calls
        self._pieces = {n: EvaluatedPiece(network) for n, network in networks.items()}

    def run(self, step: StepInputs, kv_cache: torch.Tensor) -> None:
        """Pieces by the evaluator, everything else by its reference."""
        for call in self._calls:
            if call.op == TENSORRT_OP:
                self._pieces[str(call.attributes["piece"])].run(call, step)
            else:
                ReferenceProgram([call]).run(step, kv_cache)


class EvaluatedPiece:
    """One network with the shapes of its bindings."""

    def __init__(
        self, piece: PieceNetwork, weights: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """weights: where all runs have the same."""
        self.bindings = piece.bindings
        fixed = {b.name: weights[b.name].reshape(b.shape) for b in piece.bindings
                 if weights and b.name in weights}  # fmt: skip
        self.evaluator = Evaluator(piece.network, piece.constants, fixed)

    def run(self, call: OpCall, step: StepInputs) -> None:
        """Evaluate with the call's tensors; nothing where the step has no row for it."""
        feeds = self.feeds(call, step)
        if feeds is not None:
            self.store(self.evaluator.run(feeds), call)

    def feeds(self, call: OpCall, step: StepInputs) -> dict[str, np.ndarray] | None:
        """The inputs by binding; None where the step has no row that the piece computes."""
        sizes = {"tokens": step.num_tokens, "rows": step.num_rows}
        feeds = {}
        for binding in self.bindings:
            if not binding.is_input:
                continue
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in binding.shape]
            if 0 in shape:
                return None
            if binding.name in call.inputs:
                array = to_numpy(call.inputs[binding.name]).reshape(-1)
                feeds[binding.name] = array[: int(np.prod(shape))].reshape(shape)
            else:
                feeds[binding.name] = getattr(step, binding.name)
        return feeds

    def store(self, found: Mapping[str, np.ndarray], call: OpCall) -> None:
        """Write the outputs where the call wants them."""
        for name, array in found.items():
            target = to_numpy(call.outputs[name])
            target[: len(array)] = array


class Ranks:
    """A tensor-parallel engine: every rank with its weights, activations and cache, in lockstep."""

    def __init__(self, checkpoint: Path, num_ranks: int, **options: Any) -> None:
        engine = plan_engine(checkpoint, "tensorrt-rtx", tp_size=num_ranks, **options)
        self._networks = [networks_of(engine) for _ in range(num_ranks)]
        self.ranks = [
            bind(engine, lambda calls, _: EvaluatedProgram(calls, {}), rank)
            for rank in range(num_ranks)
        ]
        self._pieces = [
            {name: EvaluatedPiece(piece) for name, piece in networks.items()}
            for networks in self._networks
        ]

    def logits(self, step: StepInputs) -> list[np.ndarray]:
        """Every operator on every rank before the next one; the logits of each."""
        for calls in zip(*(rank.calls for rank in self.ranks), strict=True):
            if calls[0].op != TENSORRT_OP:
                for call, rank in zip(calls, self.ranks, strict=True):
                    ReferenceProgram([call]).run(step, rank.kv_cache)
                continue
            name = str(calls[0].attributes["piece"])
            pieces = [pieces[name] for pieces in self._pieces]
            feeds = [p.feeds(call, step) for p, call in zip(pieces, calls, strict=True)]
            if feeds[0] is None:
                continue
            found = evaluate_together([p.evaluator for p in pieces], feeds)
            for piece, call, values in zip(pieces, calls, found, strict=True):
                piece.store(values, call)
        shown = [rank.tensors[rank.plan.logits][: step.num_rows] for rank in self.ranks]
        return [logits.numpy().copy() for logits in shown]


@dataclass(frozen=True)
class Request:
    """One request's share of a step: its next tokens, after `done` others."""

    blocks: tuple[int, ...]
    done: int
    tokens: list[int]
    num_rows: int  # of its last tokens get logits

    def then(self, tokens: list[int], num_rows: int, keep: int | None = None) -> Request:
        """The same request in a later step, with `keep` of the tokens that were read."""
        kept = len(self.tokens) if keep is None else keep
        return replace(self, done=self.done + kept, tokens=tokens, num_rows=num_rows)


Steps = list[tuple[str, list[Request]]]  # named, in the order in which they are run


def make_step(requests: list[Request], tokens_per_block: int = 16) -> StepInputs:
    """One packed step of requests, which advance by what they read."""
    ids, positions, slots, rows, cu_q = [], [], [], [], [0]
    tables = np.zeros((len(requests), max(len(r.blocks) for r in requests)), np.int32)
    lengths = []
    for index, request in enumerate(requests):
        new = np.arange(request.done, request.done + len(request.tokens))
        ids += request.tokens
        positions += new.tolist()
        blocks = np.array(request.blocks)
        slots += (
            blocks[new // tokens_per_block] * tokens_per_block + new % tokens_per_block
        ).tolist()
        cu_q.append(len(ids))
        rows += range(len(ids) - request.num_rows, len(ids))
        tables[index, : len(blocks)] = blocks
        lengths.append(request.done + len(request.tokens))
    return StepInputs(
        *(np.array(a, np.int32) for a in (ids, positions, cu_q, lengths)),
        tables,
        *(np.array(a, np.int32) for a in (slots, rows)),
    )
