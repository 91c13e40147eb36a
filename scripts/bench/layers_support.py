"""Steps of a model with random weights, its decoder layers as one launch or as many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.device_kernels import DeviceKernels
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.fused.decoder_layers.chain import find_layers
from llmctl.plugins.fused.decoder_layers.kernel import Chain, find_chains
from llmctl.plugins.fused.decoder_layers.tactics import Pace, Tactic, measured_tactics
from llmctl.plugins.schemes.scheme import Form, packing_of
from llmctl.plugins.schemes.table import find_form
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
from llmctl.runtime.engines.graphs import capture_graph, kv_bucket, shape_of
from scripts.bench.plan_support import plan_shape
from scripts.models.planted_shapes import SHAPES, Shape

CONTEXT = 4096  # tokens of the cache, unless a request has another limit
STEPS, REPLAYS = 10, 12  # steps of a graph, and how often it is timed


class CompiledWhenLaunched(DeviceKernels):
    """Compiles what is launched, instead of taking it from an engine."""

    def _find(self, spec: KernelSpec) -> Any:
        if spec.name not in self._loaded:
            self._loaded[spec.name] = self.driver.load(compile_kernel(spec))
        return self._loaded[spec.name]


class Model:
    """A model of a shape in `SHAPES`, or of one given, in device memory. Scales are such that every
    layer counts for the logits."""

    def __init__(
        self,
        shape: str | Shape,
        tokens: int = 1,
        request: BuildRequest | None = None,
        kv_algo: str | None = "FP8",
        qformat: str = "fp8",
        quantized_head: bool = False,
        scale: float = 1 / 32,
    ) -> None:
        """`tokens`: the most of a step that one launch takes; `kv_algo`: FP8, INT8 or None, the
        model's own type; `qformat`: of the weights, as `llmctl quantize` has it, and of the output
        projection's with `quantized_head`; `scale`: of tokens, keys and values."""
        shape = SHAPES[shape] if isinstance(shape, str) else shape
        excluded = [] if quantized_head else ["lm_head"]
        request = request or BuildRequest(max_batch_size=4, max_seq_len=CONTEXT)
        plan, limits = plan_shape(shape, request, kv_algo, qformat, excluded)
        self.queue = DeviceQueue()
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(size: torch.Size, spread: float, dtype: torch.dtype) -> torch.Tensor:
            made = torch.empty(size, device="cuda", dtype=dtype)
            for piece in made.view(-1).split(1 << 26):
                values = torch.randn(piece.shape, device="cuda", generator=generator) * spread
                piece.copy_(values.clamp(-400, 400))
            return made

        forms: dict[str, Form] = {}  # of packed weights, by name
        for op in plan.ops:
            if op.op.startswith("packed_linear"):
                (weight,) = [t for t in plan.tensors if t.name == op.inputs["weight"]]
                forms[weight.name] = find_form(weight.dtype, op.attributes)
        weights = {}
        for tensor in plan.tensors:
            if tensor.kind != "weight":
                continue
            dtype = getattr(torch, tensor.dtype)
            size = torch.Size(int(n) for n in tensor.shape)
            if tensor.name.endswith("weight_scale"):
                weight = next(t for t in plan.tensors if tensor.name == f"{t.name}_scale")
                form = forms[weight.name]
                inner = int(weight.shape[1]) * form.columns
                assert form.spread is not None
                weights[tensor.name] = torch.full(
                    size, 1 / (form.spread * inner**0.5), dtype=dtype, device="cuda"
                )
            elif tensor.name.endswith("_scale"):
                weights[tensor.name] = torch.full(size, scale, dtype=dtype, device="cuda")
            elif tensor.name in forms and forms[tensor.name].is_coded:
                weights[tensor.name] = torch.empty(size, dtype=dtype, device="cuda")
                packing_of(forms[tensor.name]).fill_random(weights[tensor.name], generator)
            else:
                spread = forms[tensor.name].spread if tensor.name in forms else None
                weights[tensor.name] = normal(size, spread or 1.0, dtype)
        arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device="cuda")
        tensors = bind_plan(plan, weights, arena)
        self.calls = make_calls(plan, tensors)
        self.plan = plan
        self.logits = tensors[plan.logits]
        kernels = CompiledWhenLaunched([], torch.device("cuda"), None, use_pdl=True)
        self.program = CudaProgram(self.calls, kernels, limits)
        self.tokens, layers = tokens, find_layers(self.calls, limits)
        self.chains: list[Chain]
        self.set_tactics(measured_tactics(layers[0], tokens, is_always=True) if layers else ())
        self.block = limits.tokens_per_block
        self.context = request.max_seq_len  # tokens of the cache
        blocks = self.context // self.block
        cache = normal(
            torch.Size(kv_cache_shape(plan, blocks)), 32.0, getattr(torch, plan.kv_cache.dtype)
        )
        self.program.bind_kv_cache(cache)
        self.cache = cache.view(torch.uint8)
        self.before = self.cache.clone()
        self.order = np.random.default_rng(3).permutation(blocks).astype(np.int32)
        torch.cuda.synchronize()

    def step(
        self, context: int, tokens: int, padding: int = 0, rows: int = 1
    ) -> tuple[StepInputs, StepShape]:
        """The last tokens of one request, with padding behind them, and the shape of the grids.
        `rows`: how many of them get logits, the last ones."""
        positions = np.arange(context - tokens, context, dtype=np.int32)
        slots = self.order[positions // self.block] * self.block + positions % self.block
        extended = np.pad(positions, (0, padding))
        step = StepInputs(
            token_ids=np.arange(7, 7 + tokens + padding, dtype=np.int32),
            position_ids=extended,
            cu_q=np.array([0, tokens], np.int32),
            kv_len=np.array([context], np.int32),
            block_tables=self.order[None].copy(),
            slot_mapping=np.pad(slots, (0, padding), constant_values=-1).astype(np.int32),
            logit_rows=np.arange(tokens - rows, tokens, dtype=np.int32).clip(0),
        )
        shape = replace(shape_of(step), max_query_len=tokens + padding)
        return step, replace(shape, max_kv_len=kv_bucket(context, self.program.limits))

    def set_pace(self, pace: Pace) -> None:
        """How the one launch brings weights from now on; none are held where tiles come through the
        ring."""
        self.chains = [
            replace(chain, tactic=replace(chain.tactic, pace=pace._replace(held=held)))
            for chain in self.chains
            for held in (0 if chain.tactic.is_long else pace.held,)
        ]

    def set_tactics(self, tactics: Sequence[Tactic]) -> None:
        """The binaries of the one launch from now on."""
        self.chains = find_chains(self.calls, self.program.limits, {self.tokens: tactics})

    def use(self, one_launch: bool) -> None:
        """Choose how the next steps run."""
        self.program._chains = self.chains if one_launch else []
        self.program.forget()

    def run(self, step: StepInputs, shape: StepShape, one_launch: bool) -> list[torch.Tensor]:
        """Logits and cache after a step."""
        self.use(one_launch)
        self.cache.copy_(self.before)
        torch.cuda.synchronize()
        self.program.upload(step, self.queue.handle)
        self.program.enqueue(shape, self.queue.handle)
        torch.cuda.synchronize()
        return [self.logits[: step.num_rows].clone(), self.cache.clone()]

    def has_same_bits(self, context: int, tokens: int, padding: int = 0) -> bool:
        """Whether a step gives the same logits and cache either way."""
        step, shape = self.step(context, tokens, padding)
        many, one = (self.run(step, shape, way) for way in (False, True))
        return all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(many, one, strict=True)
        )

    def milliseconds(
        self, context: int, one_launch: bool, tokens: int = 1, rows: int = 1
    ) -> list[float]:
        """Of a step: for each replay of a graph of steps."""
        self.use(one_launch)
        step, shape = self.step(context, tokens, rows=rows)
        self.program.upload(step, self.queue.handle)
        self.program.enqueue(shape, self.queue.handle)
        self.queue.synchronize()

        def record() -> None:
            for _ in range(STEPS):
                self.program.enqueue(shape, self.queue.handle)

        graph = capture_graph(self.queue, record)
        times = []
        for _ in range(REPLAYS):
            begin, end = self.queue.make_event(), self.queue.make_event()
            with self.queue.scope():
                begin.record()
            graph.replay()
            with self.queue.scope():
                end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / STEPS)
        return sorted(times)
