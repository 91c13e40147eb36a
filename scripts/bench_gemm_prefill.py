"""Checks and times the packed products of many tokens on a GPU.

    python scripts/bench_gemm_prefill.py [--check] [--tokens 128,512,2048] [--models 70b,8b]

--check compares with the references over the operators' cases, and tile shapes and token counts
with each other bit by bit. Times are medians of a graph's replays, beside torch._scaled_mm (fast
accumulation) or torch.matmul for the same sizes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import bench_gemm
import torch

from llmctl.plugins.cuda.kernel import StepLimits
from llmctl.plugins.examples import Example, make_example
from llmctl.plugins.packed_linear.decode import DecodeVariant, decode_launch
from llmctl.plugins.packed_linear.layout import pair_order, restore, rope_order
from llmctl.plugins.packed_linear.prefill import (
    LONG,
    NARROW,
    SQUARE,
    WIDE,
    Variant,
    choose,
    prefill_launch,
    variants_of,
)
from llmctl.plugins.program import OpCall
from llmctl.plugins.quantize.reference import write_output
from llmctl.plugins.reference import ReferenceProgram
from llmctl.plugins.rope_kv_write.reference import reference as rope_kv_write
from llmctl.plugins.spec import ROUNDING
from llmctl.plugins.specs import SPECS
from llmctl.plugins.swiglu.reference import swiglu

bench_gemm.MAX_TOKENS = 4096
FP8 = torch.float8_e4m3fn
ROPE_ATTRIBUTES = ("num_heads", "num_kv_heads", "head_size")
PLAIN_ROLES = ("x", "weight", "weight_scale", "x_scale", "bias")
SHAPES = {
    "70b": [
        ("qkv", 10240, 8192),
        ("o", 8192, 8192),
        ("gate", 57344, 8192),
        ("swiglu", 57344, 8192),
        ("down", 8192, 28672),
    ],
    "8b": [
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate", 28672, 4096),
        ("swiglu", 28672, 4096),
        ("down", 4096, 14336),
    ],
}

EXTRA_CASES = {  # more tokens than the operators' own cases have
    "packed_linear": [
        {"tokens": m, "outputs": o, "inner": k, "dtype": dtype, "out": out, "x_scaling": scaling,
         "bias": bias}
        for m, o, k, out, scaling, bias in (
            (65, 200, 1040, "T", "per_token", True),
            (300, 520, 2304, "T", "static", False),
            (257, 131, 640, "float32", "per_token", False),
        )
        for dtype in ("bfloat16", "float16", "float8_e4m3fn")
    ],
    "packed_linear_swiglu": [
        {"tokens": 300, "hidden": 200, "inner": 1040, "dtype": dtype, "scaling": scaling,
         "model_dtype": "bfloat16" if dtype == "float8_e4m3fn" else dtype,
         "x_scaling": "per_token", "bias": True}
        for dtype, scaling in (
            ("bfloat16", "none"), ("float16", "none"), ("float8_e4m3fn", "none"),
            ("float8_e4m3fn", "static"),
        )
    ],
    "packed_linear_rope_kv": [
        {"requests": "150+3 1+70 40+0", "inner": 1040, "num_heads": 8, "num_kv_heads": 2,
         "head_size": size, "dtype": dtype, "model_dtype": "bfloat16", "kv_dtype": kv,
         "x_scaling": "static", "bias": size == 80}
        for size in (64, 80, 128)
        for dtype, kv in (("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"))
    ],
}  # fmt: skip


def on_device(example: Example, bench: bench_gemm.Bench) -> tuple[OpCall, torch.Tensor]:
    """The call with device tensors, and the cache; the bench's environment is set for it."""
    call = example.call
    inputs = {role: tensor.cuda() for role, tensor in call.inputs.items()}
    outputs = {role: tensor.cuda() for role, tensor in call.outputs.items()}
    cache = example.kv_cache.cuda()
    step = replace(
        bench.env.step,
        position_ids=torch.from_numpy(example.step.position_ids).cuda(),
        slot_mapping=torch.from_numpy(example.step.slot_mapping).cuda(),
    )
    kv_dtype = str(cache.dtype).removeprefix("torch.")
    limits = StepLimits(4096, 4096, 16, 4096, 16, 32, kv_dtype)
    bench.env = replace(bench.env, step=step, kv_cache=cache, limits=limits)
    return OpCall(call.op, call.name, inputs, outputs, call.attributes), cache


def worst(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> float:
    """Largest error over its tolerance; above 1 is a failure, and so is NaN."""
    found, wanted = found.cpu().double(), wanted.double()
    ratio = ((found - wanted).abs() / (atol + rtol * wanted.abs())).max()
    return float("inf") if ratio.isnan() else ratio.item()


def check_products(bench: bench_gemm.Bench) -> None:
    """Every tile shape on the operator's cases, against the reference."""
    spec = SPECS["packed_linear"]
    for name in {variant.name: None for variant in (WIDE, LONG, SQUARE, NARROW)}:
        largest = 0.0
        for seed, case in enumerate([*spec.cases, *EXTRA_CASES["packed_linear"]]):
            example = make_example("packed_linear", case, seed)
            call, _ = on_device(example, bench)
            variant = next((v for v in variants_of(call) if v.name == name), None)
            if variant is None:
                continue
            wanted = example.clone()
            ReferenceProgram([wanted.call]).run(wanted.step, wanted.kv_cache)
            torch.cuda.synchronize()
            bench.run(prefill_launch(call, bench.env, example.step.num_tokens, variant))
            right = wanted.call.outputs["out"]
            tolerance = spec.tolerance[str(right.dtype).removeprefix("torch.")]
            ratio = worst(call.outputs["out"], right, tolerance.rtol, tolerance.atol)
            largest = max(largest, ratio)
            if ratio > 1:
                print("BAD", name, case, f"{ratio:.3g}")
        print(f"products {name}: largest error {largest:.2f} of the tolerance", flush=True)


def columns_of(matrix: torch.Tensor) -> torch.Tensor:
    """The transpose in memory of its own, also where it has one column."""
    transposed = torch.empty(matrix.shape[::-1], dtype=matrix.dtype)
    return transposed.copy_(matrix.T)


def check_composition(bench: bench_gemm.Bench) -> None:
    """Fused epilogues equal the references applied to the product that the kernel itself gives.

    The rotary embedding and the KV write exactly; SwiGLU, which rounds twice, to two units in the
    last place. (Against the reference's own product they differ by more: where a product rounds
    the other way, what is made of it moves too.)
    """
    for op in ("packed_linear_rope_kv", "packed_linear_swiglu"):
        largest = 0.0
        for seed, case in enumerate([*SPECS[op].cases, *EXTRA_CASES[op]]):
            example = make_example(op, case, seed)
            call, cache = on_device(example, bench)
            heads = [int(call.attributes.get(k, 0)) for k in ROPE_ATTRIBUTES]
            width = next(iter(call.outputs.values())).shape[1]
            is_rope = op == "packed_linear_rope_kv"
            order = rope_order(*heads) if is_rope else pair_order(width)
            count, model = example.step.num_tokens, getattr(torch, str(case["model_dtype"]))
            plain = {k: v for k, v in call.inputs.items() if k in PLAIN_ROLES}
            out = torch.empty(count, len(order), dtype=model, device="cuda")
            product = OpCall("packed_linear", "product", plain, {"out": out}, {})
            torch.cuda.synchronize()
            offered = variants_of(call)
            variant = offered[seed % len(offered)]
            bench.run(prefill_launch(product, bench.env, count, NARROW))
            bench.run(prefill_launch(call, bench.env, count, variant))
            logical = restore(columns_of(out.cpu()), order).T.contiguous()
            given, wanted = example.call.inputs, example.clone()
            if is_rope:
                rest = {k: v for k, v in given.items() if k in ("rotary", "k_scale", "v_scale")}
                rope_kv_write({"qkv": logical, **rest}, wanted.call.outputs, call.attributes,
                              wanted.step, wanted.kv_cache)  # fmt: skip
                pairs = [(cache, wanted.kv_cache), (call.outputs["q"], wanted.call.outputs["q"])]
            else:
                write_output(swiglu(logical), given, wanted.call.outputs)
                pairs = [(call.outputs["out"], wanted.call.outputs["out"])]
            for found, right in pairs:
                kind = str(right.dtype).removeprefix("torch.")
                exact = torch.equal(found.cpu().view(torch.uint8), right.view(torch.uint8))
                ratio = 0.0 if exact else worst(found, right, ROUNDING[kind].rtol, 1e-6)
                largest = max(largest, ratio)
                if ratio > (0 if is_rope else 2):
                    print("BAD", op, variant.name, count, case, kind, f"{ratio:.3g}")
        print(f"composition {op}: largest error {largest:.2f} units in the last place", flush=True)


def check_bits(bench: bench_gemm.Bench) -> None:
    """Tile shapes, token counts and the kernel for few tokens give the same bits."""
    few = DecodeVariant.parse("n8r1c1s11k1g0l0")
    model = bench_gemm.Model("small", 0, 0, 8, 128, 1, 2)
    for op, dtype, rows, inner in (
        ("packed_linear", "fp8", 1088, 8192),
        ("packed_linear", "fp8", 520, 28672),
        ("packed_linear", "fp8", 328, 1040),
        ("packed_linear", "bfloat16", 1088, 4096),
        ("packed_linear_swiglu", "fp8", 1152, 4096),
        ("packed_linear_rope_kv", "fp8", 1536, 4096),
    ):
        call = bench.call(op, rows, inner, dtype, model=model)
        out = next(iter(call.outputs.values()))
        limits = replace(bench.env.limits, kv_dtype="float8_e4m3fn")
        positions = torch.arange(4096, dtype=torch.int32, device="cuda")
        slots = torch.full_like(positions, -1)
        step = replace(bench.env.step, position_ids=positions, slot_mapping=slots)
        bench.env = replace(bench.env, limits=limits, step=step)
        torch.cuda.synchronize()
        bench.run(prefill_launch(call, bench.env, 2048, NARROW))
        first = out.clone().view(torch.uint8)
        bad = []
        for variant in variants_of(call):
            for tokens in (65, 128, 300, 2048):
                out.view(torch.uint8).fill_(0x7F)
                torch.cuda.synchronize()
                bench.run(prefill_launch(call, bench.env, tokens, variant))
                same = torch.equal(out.view(torch.uint8)[:tokens], first[:tokens])
                rest = bool((out.view(torch.uint8)[tokens:] == 0x7F).all())
                bad += [(variant.name, tokens)] * (not same or not rest)
        bench.run(decode_launch(call, bench.env, 64, few))
        bad += [("few", 64)] * (not torch.equal(out.view(torch.uint8)[:64], first[:64]))
        x = call.inputs["x"]
        for token in (0, 130, 2047) if op != "packed_linear_rope_kv" else ():
            alone = replace_x(call, x[token : token + 1].clone())
            bench.run(decode_launch(alone, bench.env, 1, few))
            bad += [("alone", token)] * (
                not torch.equal(out.view(torch.uint8)[:1], first[token : token + 1])
            )
        print(f"bits {op} {dtype} {rows}x{inner}:", bad or "equal", flush=True)


def replace_x(call: OpCall, x: torch.Tensor) -> OpCall:
    """The call on another `x`."""
    return OpCall(call.op, call.name, {**call.inputs, "x": x}, call.outputs, call.attributes)


def library_us(bench: bench_gemm.Bench, call: OpCall, rows: int, tokens: int) -> float:
    """Median microseconds of torch's product of the same size."""
    x = call.inputs["x"][:tokens]
    inner = x.shape[1]
    weight = call.inputs["weight"].view(-1)[: rows * inner].view(rows, inner)  # any numbers
    one = torch.ones((), device="cuda")

    def multiply() -> None:
        if x.dtype == FP8:
            torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            torch.matmul(x, weight.T)

    return graph_us(bench.stream, [multiply] * 3)


def graph_us(stream: torch.cuda.Stream, work: list, repeats: int = 7) -> float:
    """Median microseconds per piece of work, in a replayed graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for enqueue in work:
            enqueue()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for enqueue in work:
                enqueue()
        times = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(work))
    return sorted(times[1:])[repeats // 2]


def time_model(
    bench: bench_gemm.Bench, name: str, dtype: str, counts: list[int], variants: list[Variant]
) -> None:
    """A row per product and number of tokens: TFLOP/s of every variant and of the library."""
    for what, rows, inner in SHAPES[name]:
        if what == "swiglu" and dtype != "fp8":
            continue
        op = "packed_linear_swiglu" if what == "swiglu" else "packed_linear"
        call = bench.call(op, rows, inner, dtype)
        shapes = variants or variants_of(call)
        bench.compile([prefill_launch(call, bench.env, 128, variant) for variant in shapes])
        for tokens in counts:
            flop = 2 * tokens * rows * inner
            cells = []
            for variant in shapes:
                prepared = bench.prepare(prefill_launch(call, bench.env, tokens, variant))
                stream = bench.stream.cuda_stream
                us = graph_us(bench.stream, [lambda p=prepared, s=stream: p(s)] * 3)
                cells.append(f"{variant.name} {us:8.1f} us {flop / us / 1e6:6.0f}")
            us = library_us(bench, call, rows, tokens)
            cells.append(f"torch {us:8.1f} us {flop / us / 1e6:6.0f}")
            chosen = choose(call, tokens, 132).name
            print(f"{name} {dtype} {what} M={tokens}: " + " | ".join(cells), chosen, flush=True)
        del call
        torch.cuda.empty_cache()


def time_layer(bench: bench_gemm.Bench, name: str, counts: list[int]) -> None:
    """A row per number of tokens: a layer's FP8 products one after the other, and the library's."""
    shapes = [shape for shape in SHAPES[name] if shape[0] != "gate"]
    calls = [
        bench.call("packed_linear_swiglu" if what == "swiglu" else "packed_linear", rows, inner)
        for what, rows, inner in shapes
    ]
    for tokens in counts:
        bench.compile([prefill_launch(call, bench.env, tokens) for call in calls])
        prepared = [bench.prepare(prefill_launch(call, bench.env, tokens)) for call in calls]
        stream = bench.stream.cuda_stream
        us = 4 * graph_us(bench.stream, [lambda p=p, s=stream: p(s) for p in prepared] * 3)
        pairs = [
            (call.inputs["x"][:tokens], call.inputs["weight"].view(-1)[: rows * inner])
            for call, (_, rows, inner) in zip(calls, shapes, strict=True)
        ]
        one = torch.ones((), device="cuda")

        def multiply(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor = one) -> None:
            weight = weight.view(-1, x.shape[1])
            torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        library = 4 * graph_us(bench.stream, [lambda p=p: multiply(*p) for p in pairs] * 3)
        flop = sum(2 * tokens * rows * inner for _, rows, inner in shapes)
        rates = f"{flop / us / 1e6:.0f} TFLOP/s | torch {library:.1f} us {flop / library / 1e6:.0f}"
        print(f"{name} fp8 layer M={tokens}: {us:.1f} us {rates}", flush=True)


def parse_variant(text: str) -> Variant:
    """Variant of "row tiles a warpgroup,tokens,cluster,a stages,b stages"."""
    return Variant(*map(int, text.split(",")))


def main() -> None:
    """Parse options; check; time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--models", default="70b")
    parser.add_argument("--tokens", default="128,256,512,1024,2048,4096")
    parser.add_argument("--dtypes", default="fp8,bfloat16")
    parser.add_argument("--variant", action="append", default=[], help=parse_variant.__doc__)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = bench_gemm.Bench()
    if options.check:
        check_products(bench)
        check_composition(bench)
        check_bits(bench)
    counts = [int(count) for count in options.tokens.split(",") if count]
    variants = [parse_variant(text) for text in options.variant]
    bench.env = replace(bench.env, limits=StepLimits(4096, 4096, 16, 4096, 16, 32, "bfloat16"))
    for name in filter(None, options.models.split(",")):
        if "fp8" in options.dtypes:
            time_layer(bench, name, counts)
        for dtype in options.dtypes.split(","):
            time_model(bench, name, dtype, counts, variants)


if __name__ == "__main__":
    main()
