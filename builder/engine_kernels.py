"""The binaries of a cuda engine: which ones its steps and rounds need, compiled without a GPU.

Every operator names its kernels from the plan alone (`kernel.py`), on meta tensors, so this costs
milliseconds for a model of any size: its layers share kernels. Compiling takes about a second per
kernel and happens once per machine; `plugins/backends/cuda/compiler.py` caches the results.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmctl.builder.engine_format import REDRAFTER_NEXT, Plan, PlanKernel
from llmctl.builder.meta_calls import alike, calls_by_cache, without_memory
from llmctl.builder.meta_calls import distinct_calls as distinct_calls
from llmctl.builder.meta_calls import meta_cache as meta_cache
from llmctl.builder.meta_calls import meta_calls as meta_calls
from llmctl.builder.meta_calls import meta_step as meta_step
from llmctl.builder.plan import TENSORRT_OP
from llmctl.plugins.backends.cuda.best_ids import BestIds
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import Extent, OpCall
from llmctl.plugins.core.fused_calls import FusedCalls
from llmctl.plugins.core.operators import operator_module
from llmctl.plugins.fused.decoder_layers.kernel import (
    Chain,
    chain_launch,
    chain_spec,
    find_chains,
)
from llmctl.plugins.ops.packed_linear.best import best_kernels

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.backends.cuda.compiler import CompiledKernel

OnKernel = Callable[[str, int, int], None]  # (name, kernels done, kernels in all)
MOST_COMPILERS = 8  # CUDA C++ compilers at a time: eight take 200 MB


def kernel_specs(plan: Plan, limits: StepLimits) -> list[KernelSpec]:
    """Every binary that steps and rounds of this engine may launch, by name, each once."""
    found = step_kernels(plan, limits, distinct_calls(plan))
    found += [chain_spec(chain, limits) for chain in plan_chains(plan, limits)]
    specs: dict[str, KernelSpec] = {}
    for spec in found:
        assert specs.setdefault(spec.name, spec) == spec, f"two kernels are called {spec.name}"
    return [specs[name] for name in sorted(specs)]


def step_kernels(
    plan: Plan, limits: StepLimits, calls: Iterable[tuple[OpCall, Extent]]
) -> list[KernelSpec]:
    """Those of the plan's `distinct_calls`, of heads with a cache of their own, of sampling and of
    rounds; some are there more than once."""
    import torch

    from llmctl.plugins.device_loop import kernel as rounds
    from llmctl.plugins.device_loop import pairs_kernel, tree_kernel
    from llmctl.plugins.ops.beam_search import kernel as beam_search
    from llmctl.plugins.ops.kv_compact import kernel as kv_compact
    from llmctl.plugins.ops.lookahead import kernel as lookahead
    from llmctl.plugins.ops.rank_offers import kernel as rank_offers
    from llmctl.plugins.ops.sampling import kernel as sampling
    from llmctl.plugins.ops.tree_growth import kernel as tree_growth

    (vocab_size,) = [t.shape[1] for t in plan.tensors if t.name == plan.logits]
    assert isinstance(vocab_size, int)
    found = [
        *sampling.kernels(vocab_size),
        *rounds.kernels(limits.max_batch_size, limits.max_draft_len, vocab_size),
    ]
    listed: int | None = None
    if plan.head_shares is not None:
        has_sums = REDRAFTER_NEXT in plan.heads
        found.append(rank_offers.spec(*plan.head_shares, vocab_size, has_sums=has_sums))
        listed = rank_offers.num_chunks(*plan.head_shares)
    if plan.heads and limits.max_draft_len:
        sizes = (limits.max_batch_size, limits.max_draft_len, vocab_size)
        found += tree_kernel.tree_kernels(*sizes, listed)
    drafts_levels = all(op.op != TENSORRT_OP for op in plan.ops)  # else there is no such attention
    if drafts_levels and (plan.head_caches or not plan.heads):  # of a head, or as a draft engine
        found += tree_growth.kernels(limits, vocab_size)
    if drafts_levels and limits.takes_trees and not plan.heads:  # a draft engine's
        found += tree_kernel.round_kernels(limits.max_batch_size, limits.max_draft_len)
    if limits.lookahead is not None:
        found += tree_kernel.round_kernels(limits.max_batch_size, limits.max_draft_len)
        found += lookahead.kernels(limits.lookahead, limits.max_draft_len)
    if REDRAFTER_NEXT in plan.heads:
        num_beams = plan.max_num_beams // plan.max_num_requests
        length = limits.max_draft_len // num_beams
        sizes = (num_beams, length, vocab_size)
        found += beam_search.kernels(*sizes, limits.max_draft_len, listed)
    if plan.head_caches:
        found.append(pairs_kernel.read_pairs_spec(limits.max_batch_size, limits.max_draft_len))
        found.append(pairs_kernel.read_path_spec(limits.max_batch_size))
        found += _passed(plan)
    if limits.takes_trees:
        cache = plan.kv_cache
        token_bytes = cache.head_size * getattr(torch, cache.dtype).itemsize
        found += kv_compact.kernels(cache.num_kv_heads, cache.tokens_per_block, token_bytes)
    given = [call for call, _ in calls]
    for call in given:
        found += _module(call.op).kernels(call, limits)
    product = _best_ids(plan, given).product
    found += best_kernels(product, limits) if product is not None else []
    for name, spec in plan.head_caches.items():
        own = replace(limits, kv_dtype=spec.dtype)
        for call, _ in distinct_calls(plan, name):
            found += _module(call.op).kernels(call, own)
    return found


def _best_ids(plan: Plan, calls: Iterable[OpCall]) -> BestIds:
    """As the program of the base graph finds them; of the `distinct_calls`."""
    names = {op.name for op in plan.ops}
    return BestIds(call for call in calls if call.name in names)


def _passed(plan: Plan) -> list[KernelSpec]:
    """Copies of rows of what graphs put out, logits aside, to inputs of heads in device rounds."""
    import torch

    from llmctl.plugins.ops.gather_rows.kernel import gather_spec

    outputs = [graph.outputs.items() for graph in plan.graphs.values()]
    names = {tensor for items in outputs for name, tensor in items if name != "logits"}
    return [
        gather_spec(without_memory((1, int(t.shape[1])), getattr(torch, t.dtype)))
        for t in plan.tensors
        if t.name in names
    ]


def compile_kernels(
    specs: Iterable[KernelSpec], capability: str, on_kernel: OnKernel = lambda *_: None
) -> list[CompiledKernel]:
    """Compile every spec that is not in this machine's cache; returns kernels in the order of
    specs.

    Triton's compiler holds Python's lock, so its kernels are compiled one after another in this
    thread, and those in CUDA C++ in parallel on all cores. Raises MissingPackage if a compiler is
    missing, KernelCompileError.
    """
    from llmctl.plugins.backends.cuda.compiler import compile_kernel

    specs = list(specs)
    compiled: dict[str, CompiledKernel] = {}
    with ThreadPoolExecutor(min(MOST_COMPILERS, len(os.sched_getaffinity(0)))) as pool:
        cuda = [spec for spec in specs if not spec.is_triton]
        pending = {spec.name: pool.submit(compile_kernel, spec, capability) for spec in cuda}
        try:
            for index, spec in enumerate(sorted(specs, key=lambda spec: not spec.is_triton)):
                on_kernel(spec.name, index, len(specs))
                if spec.is_triton:
                    compiled[spec.name] = compile_kernel(spec, capability)
                else:
                    compiled[spec.name] = pending[spec.name].result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # cancels those that have not started
            raise
    return [compiled[spec.name] for spec in specs]


def plan_chains(plan: Plan, limits: StepLimits) -> list[Chain]:
    """Layers that one launch may compute. It stores nothing between them, so there are none if an
    intermediate result is an output."""
    extents = {tensor.name: tensor.shape[0] for tensor in plan.tensors}
    if any(extents[tensor] == "tokens" for tensor in plan.outputs.values()):
        return []
    return find_chains([call for call, _ in meta_calls(plan)], limits)


def fused_calls(plan: Plan, limits: StepLimits) -> tuple[FusedCalls, ...]:
    """Those layers as the plan records them."""
    return tuple(
        FusedCalls(chain.start, chain.stop, chain_spec(chain, limits).name)
        for chain in plan_chains(plan, limits)
    )


def plan_kernel(kernel: CompiledKernel, capability: str = "") -> PlanKernel:
    """A compiled kernel as the plan describes it."""
    return PlanKernel(kernel.name, len(kernel.cubin), kernel.metadata(), capability)


def scratch_bytes(plan: Plan, limits: StepLimits) -> int:
    """Device memory that kernels request besides their tensors, over `planned_shapes`."""
    sizes: dict[str, int] = {}

    def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes[name] = max(sizes.get(name, 0), math.prod(shape) * dtype.itemsize)
        return without_memory(shape, dtype)

    step = meta_step(limits)
    for own, kv_cache, calls in calls_by_cache(plan, limits):
        for call, extent in calls:
            env = LaunchEnv(step, kv_cache, own, extent, scratch, parts=alike)
            for shape in planned_shapes(own):
                _module(call.op).launches(call, env, shape)
        found = _best_ids(plan, [call for call, _ in calls])
        found.reserve(LaunchEnv(step, kv_cache, own, "rows", scratch))
    env = LaunchEnv(step, meta_cache(plan, limits), limits, "tokens", scratch)
    for chain in plan_chains(plan, limits):
        chain_launch(chain, env, StepShape(chain.tokens, 1, 1, chain.tokens, chain.tokens))
    return sum(sizes.values())


def planned_shapes(limits: StepLimits) -> list[StepShape]:
    """Steps of each kind at their largest: a long prompt chunk, alone and beside generation, and a
    full batch that is verified (trees or chains) or generates. And few tokens of one request, as
    many as products have kernels for, in short contexts and in long ones: some ask for what no
    larger step does.
    """
    batch, rows, longest = limits.max_batch_size, limits.max_num_rows, limits.max_seq_len
    most = limits.max_num_tokens
    few = [count for count in (*range(1, 18), 24, 32, 48, 64, 96, 128, 192, 256) if count <= most]
    contexts = [length for length in (1024, longest) if length <= longest]
    tree = limits.max_draft_len + 1 if limits.takes_trees else 0
    return [
        StepShape(rows, batch, rows, limits.max_draft_len + 1, longest, tree),
        StepShape(most, 1, 1, most, longest),
        StepShape(most, batch, batch, most - batch + 1, longest),
        StepShape(rows, batch, rows, limits.max_draft_len + 1, longest),
        StepShape(batch, batch, batch, 1, longest),
        *(StepShape(n, 1, min(n, rows), n, max(n, length)) for n in few for length in contexts),
    ]


def plan_launches(
    plan: Plan,
    limits: StepLimits,
    shape: StepShape,
    scratch: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor],
) -> list[Launch]:
    """What all graphs launch for a step, on meta tensors; calls that differ only in their weights
    once."""
    step = meta_step(limits)
    launches: list[Launch] = []
    for own, kv_cache, calls in calls_by_cache(plan, limits):
        for call, extent in calls:
            env = LaunchEnv(step, kv_cache, own, extent, scratch, parts=alike)
            launches += _module(call.op).launches(call, env, shape)
    return launches


def _module(op: str) -> Any:
    return operator_module(op, "kernel")
