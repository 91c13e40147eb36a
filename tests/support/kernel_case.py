"""One case of an operator's kernels on a GPU: compared with the reference, and timed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.backends.cuda.read_rate import elapsed_ms
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.core.op_spec import Case
from llmctl.plugins.core.operators import SPECS, operator_module
from support.attention_reference import weight_rounding
from support.kernel import limits_for, step_shape

CACHE_BYTES = 256 << 20  # rotate over more than any L2 cache holds
WARM_UP, REPEATS = 3, 15
FEW = 0.01  # share of elements


def moved(example: Example, device: str) -> Example:
    """A copy on a device; a tensor that serves as input and output stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensors: Any) -> dict[str, torch.Tensor]:
        return {
            role: copies.setdefault(id(tensor), tensor.to(device, copy=True))
            for role, tensor in tensors.items()
        }

    call = example.call
    fresh = OpCall(
        call.op, call.name, copy(call.inputs), copy(call.outputs), call.attributes, call.tactic
    )
    return Example(fresh, example.step, example.kv_cache.to(device, copy=True))


def program_for(example: Example) -> Any:
    """A program of the one call, its step uploaded."""
    from llmctl.plugins.backends.cuda.program import CudaProgram

    limits = limits_for(example)
    program = CudaProgram([example.call], compiled(example), limits)
    program.bind_kv_cache(example.kv_cache)
    program.upload(example.step, torch.cuda.current_stream().cuda_stream)
    return program


def compiled(example: Example) -> list[CompiledKernel]:
    """Every binary of an example's call."""
    return [compile_kernel(spec) for spec in {s.name: s for s in specs_of(example)}.values()]


def specs_of(example: Example) -> list[KernelSpec]:
    """What the operator says it needs for the example's call."""
    module = operator_module(example.call.op, "kernel")
    specs: list[KernelSpec] = module.kernels(example.call, limits_for(example))
    return specs


def check(op: str, case: Case, is_timed: bool, wants_time: bool) -> dict[str, Any]:
    """Run a case; how far it is from the reference, in tolerances, and how long it takes."""
    # Large ones are made, and their references computed, where that is fast.
    example = make_example(op, case, device="cuda" if is_timed else "cpu")
    found = moved(example, "cuda")
    wanted = moved(example, "cuda" if is_timed else "cpu")
    program = program_for(found)
    program.enqueue(step_shape(example.step), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    reference = operator_module(op, "reference").reference
    call = wanted.call
    slack = weight_rounding(wanted) if op == "paged_attention" else torch.zeros(())
    reference(call.inputs, call.outputs, call.attributes, wanted.step, wanted.kv_cache)
    errors = [
        compare(op, found.call.outputs[role], call.outputs[role], slack) for role in call.outputs
    ]
    errors.append(compare(op, found.kv_cache, wanted.kv_cache, torch.zeros(())))
    result: dict[str, Any] = {
        "error": max(e.worst for e in errors),
        "ok": all(e.is_close for e in errors),
    }
    if is_timed and wants_time:
        result["bytes"] = bytes_moved(found)
        result["us"] = measure(example)
    return result


@dataclass(frozen=True, slots=True)
class Difference:
    """worst: the largest difference as a multiple of the operator's tolerance."""

    worst: float
    is_close: bool


def compare(op: str, found: torch.Tensor, wanted: torch.Tensor, slack: torch.Tensor) -> Difference:
    """Elements are within the tolerance and `slack`, except a few where another order of a sum
    moved an intermediate rounding: those are within the tolerance of the largest element."""
    tolerance = SPECS[op].tolerance[str(wanted.dtype).removeprefix("torch.")]
    x, y = found.cpu().float(), wanted.cpu().float()
    if not torch.equal(x.isnan(), y.isnan()):
        return Difference(float("inf"), False)
    x, y = x.nan_to_num(0), y.nan_to_num(0)
    difference = torch.where(x == y, torch.zeros_like(x), (x - y).abs())
    allowed = (slack.cpu() + tolerance.atol + tolerance.rtol * y.abs()).clamp(min=1e-30)
    most = float(slack.max()) + tolerance.atol + tolerance.rtol * float(y.abs().max())
    few = float((difference > allowed).float().mean()) <= FEW
    return Difference(float((difference / allowed).max()), few and float(difference.max()) <= most)


def bytes_moved(example: Example) -> int:
    """The fewest bytes of device memory that the call must read and write."""
    call, step = example.call, example.step
    total = 0
    for role, tensor in [*call.inputs.items(), *call.outputs.items()]:
        used = tensor.nbytes
        if role == "weight" and call.op in ("embedding", "embedding_norm"):
            used = step.num_tokens * tensor[0].nbytes
        elif role == "x" and call.op == "gather_rows":
            used = step.num_rows * tensor[0].nbytes
        elif role == "rotary":
            used = min(step.num_tokens, len(tensor)) * tensor[0].nbytes
        total += used
    heads_bytes = example.kv_cache[0, 0, :, :, 0].nbytes  # K and V of one token in one layer
    if call.op == "paged_attention":
        total += int(step.kv_len.sum()) * heads_bytes
    elif call.op in ("rope_kv_write", "packed_linear_rope_kv"):
        total += step.num_tokens * heads_bytes
    return total


def measure(example: Example) -> dict[str, float]:
    """Microseconds a call, in a graph of calls on different copies of the tensors."""
    copies = max(2, min(64, -(-CACHE_BYTES // max(1, bytes_moved(example)))))
    programs = [program_for(moved(example, "cuda")) for _ in range(copies)]
    shape = step_shape(example.step)

    def record() -> None:
        for program in programs:
            program.enqueue(shape, torch.cuda.current_stream().cuda_stream)

    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    times = elapsed_ms(graph.replay, WARM_UP + REPEATS)[WARM_UP:]
    us = [1e3 * ms / copies for ms in times]
    return {"min": min(us), "median": median(us), "max": max(us)}
