"""Time every operator at the sizes its spec lists, against the limits of this machine.

    python -m scripts.bench.plugins [--op linear] [--threads N] [--isa v3] [--seconds 0.3]

Prints a Markdown table: the best of several runs, what moves or multiplies per second, and the
share of what this machine can do (measured first: reading a buffer far larger than the caches with
the same threads, and independent multiply-add chains). Weights rotate through enough copies that
none is in a cache, as in a real decode step. `--decode` times one whole step of a Llama 3.2 1B
shape with random weights instead. Sampling rows include Python's share of the call; their GB/s
count each logit once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cpu.binding import load_kernels
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.core.op_spec import FP8, Case
from llmctl.plugins.core.operators import CPU_KINDS, SPECS
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.request import SamplingConfig

COLD_BYTES = 256 << 20  # several times the last-level cache of the machines in use
SAMPLED = {  # how the rows of the sampling table are drawn
    "greedy": SamplingConfig(),
    "temperature": SamplingConfig(temperature=0.8, top_k=0),
    "top_k=50, top_p=0.9": SamplingConfig(temperature=0.8, top_k=50, top_p=0.9),
    "top_p=0.9": SamplingConfig(top_p=0.9),
    "min_p=0.05": SamplingConfig(min_p=0.05, top_k=0),
    "top_k=50, penalties": SamplingConfig(top_k=50, repetition_penalty=1.2),
}


@dataclass(frozen=True)
class Limits:
    """What the machine can do with the threads in use."""

    bytes_per_s: float
    flops_per_s: float


def best_time(call: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit in `seconds` (at least three)."""
    best, deadline, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def measure_limits(seconds: float) -> Limits:
    """Read bandwidth and multiply-add peak of the thread pool that runs the kernels."""
    buffer = np.ones(COLD_BYTES // 4, np.float32)
    functions = load_kernels()
    read = best_time(
        lambda: functions.llmctl_measure_read(buffer.ctypes.data, len(buffer)), 3 * seconds
    )
    operations = functions.llmctl_measure_multiply_add(20000)
    compute = best_time(lambda: functions.llmctl_measure_multiply_add(20000), 3 * seconds)
    return Limits(buffer.nbytes / read, operations / compute)


def cold_copies(example: Example) -> list[OpCall]:
    """The call, repeated with fresh copies of its weight until nothing stays cached."""
    weight = example.call.inputs.get("weight")
    if weight is None:
        return [example.call]
    count = max(1, min(64, COLD_BYTES // weight.nbytes))
    call = example.call
    return [
        OpCall(call.op, call.name, {**call.inputs, "weight": copy}, call.outputs, call.attributes)
        for copy in (weight, *(weight.clone() for _ in range(count - 1)))
    ]


def num_bytes(example: Example) -> int:
    """Bytes an op must read and write at least."""
    call, step = example.call, example.step
    tensors = {t.data_ptr(): t.nbytes for t in (*call.inputs.values(), *call.outputs.values())}
    total = sum(tensors.values())
    if call.op == "embedding":
        total -= call.inputs["weight"].nbytes - call.outputs["out"].nbytes
    if call.op == "paged_attention":
        per_key = example.kv_cache[0, 0, :, :, 0].numel() * example.kv_cache.element_size()
        total += int(step.kv_len.sum()) * per_key
    return total


def num_flops(example: Example) -> float:
    """Multiply-adds (as two operations each) of the products in an op."""
    call, step = example.call, example.step
    if call.op == "linear":
        return 2.0 * call.outputs["out"].shape[0] * call.inputs["weight"].numel()
    if call.op == "paged_attention":
        return 4.0 * float(step.position_ids.sum() + step.num_tokens) * call.outputs["out"].shape[1]
    return 0.0


def describe(case: Case) -> str:
    """The case in one cell of the table."""
    hidden = {"bias", "x_scaling", "qk_norm", "window", "quantize_out", "x_dtype", "residual"}
    return ", ".join(f"{k}={v}" for k, v in case.items() if k not in hidden)


def bench_case(op: str, case: Case, limits: Limits, seconds: float) -> str:
    """One row of the table."""
    example = make_example(op, case)
    calls = cold_copies(example)
    program = cpu.CpuProgram(calls)
    time_s = best_time(lambda: program.run(example.step, example.kv_cache), seconds) / len(calls)
    bytes_s, flops_s = num_bytes(example) / time_s, num_flops(example) / time_s
    share = max(bytes_s / limits.bytes_per_s, flops_s / limits.flops_per_s)
    return (
        f"| {op} | {describe(case)} | {time_s * 1e6:.1f} | {bytes_s / 1e9:.1f} "
        f"| {flops_s / 1e9:.0f} | {share:.0%} |"
    )


def bench_sampling(limits: Limits, seconds: float) -> None:
    """Print rows for one row of logits and for five, as in a verified round."""
    backend = cpu.CpuSampling()
    generator = np.random.default_rng(0)
    for vocab in (4096, 128256):
        logits = (generator.standard_normal((5, vocab)) * 3).astype(np.float32)
        counts = np.bincount(generator.integers(0, vocab, 500), minlength=vocab).astype(np.int32)
        for name, params in SAMPLED.items():
            for num_rows in (1, 5):
                rows = [SamplingRow(params, 7, 100 + row, counts) for row in range(num_rows)]
                drawn = logits[:num_rows]
                calls = {"sample": backend.sample_rows, "probs": backend.processed_probs}
                for call, function in calls.items():
                    time_s = best_time(partial(function, drawn, rows), seconds)
                    rate = drawn.nbytes / time_s
                    print(
                        f"| {call} | vocab={vocab}, rows={num_rows}, {name} | {time_s * 1e6:.1f} "
                        f"| {rate / 1e9:.1f} | | {rate / limits.bytes_per_s:.0%} |",
                        flush=True,
                    )


def decode_program(dtype: str, layers: int = 16) -> tuple[list[OpCall], torch.Tensor, int]:
    """Calls of one step of a Llama 3.2 1B shape, its cache, and the bytes of its weights."""
    hidden, inner, heads, kv_heads, size, vocab, tokens = 2048, 8192, 32, 8, 64, 128256, 16
    generator = torch.Generator().manual_seed(0)
    is_fp8 = dtype == FP8
    activation = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    one = torch.ones(1)
    weight_bytes = 0
    calls: list[OpCall] = []

    def empty(width: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros((tokens, width), dtype=kind)

    def weight(rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
        nonlocal weight_bytes
        raw = torch.randint(0, 60, (rows * columns // 4,), generator=generator, dtype=torch.int32)
        words = raw.repeat_interleave(4).to(torch.uint8)
        if kind == torch.bfloat16:
            words = words.repeat_interleave(2)
        weight_bytes += words.nbytes
        return words.view(kind).view(rows, columns)

    def linear(x: torch.Tensor, rows: int, quantized: bool = is_fp8) -> torch.Tensor:
        kind = torch.float8_e4m3fn if quantized else torch.bfloat16
        inputs = {"x": x, "weight": weight(rows, x.shape[1], kind)}
        if quantized:
            inputs |= {"weight_scale": torch.full((rows,), 1e-3), "x_scale": one}
        out = empty(rows, torch.bfloat16 if rows != vocab else torch.float32)
        calls.append(OpCall("linear", "linear", inputs, {"out": out}, {}))
        return out

    def norm(x: torch.Tensor, residual: torch.Tensor, quantized: bool = is_fp8) -> torch.Tensor:
        out = empty(hidden, activation if quantized else torch.bfloat16)
        inputs = {"x": x, "weight": torch.ones(hidden, dtype=torch.bfloat16), "residual": residual}
        inputs |= {"scale": one} if quantized else {}
        outputs = {"out": out, "residual_out": residual}
        calls.append(OpCall("rms_norm", "norm", inputs, outputs, {"epsilon": 1e-5}))
        return out

    x, residual = empty(hidden), empty(hidden)
    table = torch.zeros((vocab, hidden), dtype=torch.bfloat16)
    calls.append(OpCall("embedding", "embed", {"weight": table}, {"out": x}, {}))
    scales = {"k_scale": one, "v_scale": one} if is_fp8 else {}
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size}
    rotary = torch.ones((4096, size))
    for layer in range(layers):
        qkv = linear(norm(x, residual), (heads + 2 * kv_heads) * size)
        q, attended = empty(hidden), empty(hidden, activation)
        rope = {"layer": layer, **shape, "epsilon": 1e-5}
        inputs = {"qkv": qkv, "rotary": rotary, **scales}
        calls.append(OpCall("rope_kv_write", "rope", inputs, {"q": q}, rope))
        inputs = {"q": q, **scales} | ({"out_scale": one} if is_fp8 else {})
        attention = {"layer": layer, **shape, "softmax_scale": 0.125, "window": 0}
        calls.append(OpCall("paged_attention", "attn", inputs, {"out": attended}, attention))
        gate_up = linear(norm(linear(attended, hidden), residual), 2 * inner)
        activated = empty(inner, activation)
        inputs = {"x": gate_up} | ({"scale": one} if is_fp8 else {})
        calls.append(OpCall("swiglu", "swiglu", inputs, {"out": activated}, {}))
        x = linear(activated, hidden)
    linear(norm(x, residual, quantized=False), vocab, quantized=False)
    cache = torch.zeros((layers, 64, 2, kv_heads, 32, size), dtype=activation)
    return calls, cache, weight_bytes


def bench_decode(dtype: str, limits: Limits, seconds: float) -> None:
    """Print rows for steps of 1, 5 and 16 tokens at a context of about 500."""
    calls, cache, weight_bytes = decode_program(dtype)
    program = cpu.CpuProgram(calls)
    for tokens in (1, 5, 16):
        step, _ = make_step([(tokens, 500)])
        time_s = best_time(lambda step=step: program.run(step, cache), 4 * seconds)
        rate = weight_bytes / time_s
        print(
            f"| decode step | {dtype}, tokens={tokens} | {time_s * 1e6:.0f} | {rate / 1e9:.1f} | "
            f"| {rate / limits.bytes_per_s:.0%} |",
            flush=True,
        )


def main() -> None:
    """Parse options, measure the limits, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=[*sorted(CPU_KINDS), "sampling"])
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--isa", choices=cpu.instruction_sets())
    parser.add_argument("--seconds", type=float, default=0.3, help="per case")
    parser.add_argument("--decode", action="store_true", help="a whole 1B-shaped step")
    options = parser.parse_args()
    if options.threads is not None:
        cpu.set_num_threads(options.threads)
    if options.isa is not None:
        cpu.set_instruction_set(options.isa)
    limits = measure_limits(options.seconds)
    isa = options.isa or cpu.instruction_sets()[0]
    print(
        f"{cpu.num_threads()} threads, {isa}: reads {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {limits.flops_per_s / 1e9:.0f} GFLOP/s\n"
    )
    print("| op | size | µs | GB/s | GFLOP/s | share of limit |\n|---|---|---|---|---|---|")
    if options.decode:
        for dtype in ("bfloat16", FP8):
            bench_decode(dtype, limits, options.seconds)
        return
    if options.op in (None, "sampling"):
        bench_sampling(limits, options.seconds)
    for op in sorted(CPU_KINDS) if options.op is None else [options.op]:
        for case in SPECS[op].timed if op in SPECS else ():
            print(bench_case(op, case, limits, options.seconds), flush=True)


if __name__ == "__main__":
    main()
