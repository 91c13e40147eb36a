"""Checks and times the packed matrix products on a GPU, as chains of a layer's four products."""

from __future__ import annotations

import argparse
import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from llmctl.plugins.cuda.compiler import compile_kernel
from llmctl.plugins.cuda.driver import cuda_driver
from llmctl.plugins.cuda.kernel import DeviceStep, Launch, LaunchEnv, StepLimits
from llmctl.plugins.packed_linear.decode import DecodeVariant, decode_launch
from llmctl.plugins.packed_linear.layout import packed_shape, plain_order, restore, unpack
from llmctl.plugins.packed_linear.prefill import prefill_launch
from llmctl.plugins.packed_linear.tactics import MANY, choose_tactic, parse_tactic
from llmctl.plugins.program import OpCall

FP8 = torch.float8_e4m3fn
MAX_TOKENS = 256
LIMITS = StepLimits(MAX_TOKENS, MAX_TOKENS, 16, 4096, 16, 32, "float8_e4m3fn")


@dataclass(frozen=True)
class Model:
    """Shapes of a Llama."""

    name: str
    hidden: int
    inner: int
    heads: int
    head_size: int
    copies: int  # layers in the chain: together larger than L2
    kv_heads: int = 8


MODELS = {
    m.name: m
    for m in (
        Model("70b", 8192, 28672, 64, 128, 3),
        Model("8b", 4096, 14336, 32, 128, 6),
        Model("3b", 3072, 8192, 24, 128, 12),
        Model("1b", 2048, 8192, 32, 64, 16),
    )
}


class Bench:
    """Calls on random data, their launches, and timing of chains of launches."""

    def __init__(self) -> None:
        self.driver = cuda_driver(0)
        self.stream = torch.cuda.Stream()
        self.loaded: dict[str, object] = {}
        self.keep: list[object] = []
        self.use_pdl = True
        self.scratches: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator("cuda").manual_seed(0)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        positions = torch.arange(MAX_TOKENS, dtype=torch.int32, device="cuda")
        step = DeviceStep(
            ints(MAX_TOKENS), positions, ints(17), ints(16), ints(16, 128), positions.clone(),
            ints(MAX_TOKENS),
        )  # fmt: skip
        self.env = LaunchEnv(step, torch.empty(0), LIMITS, "tokens", self.scratch)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed once, then the same tensor for a name."""
        if name not in self.scratches:
            self.scratches[name] = torch.zeros(shape, dtype=dtype, device="cuda")
        return self.scratches[name]

    def bits(self, *shape: int) -> torch.Tensor:
        """Random finite FP8, of spread about 100."""
        size = 1
        for extent in shape:
            size *= extent
        out = torch.empty(size, dtype=torch.uint8, device="cuda")
        for start in range(0, size, 1 << 26):
            part = out[start : start + (1 << 26)]
            wide = torch.randn(len(part), generator=self.generator, device="cuda") * 100
            part.copy_(wide.clamp(-448, 448).to(FP8).view(torch.uint8))
        return out.view(FP8).view(shape)

    def call(self, op: str, rows: int, inner: int, dtype: str = "fp8", **extra: object) -> OpCall:
        """A call of the given packed rows and K; x is FP8 (or `dtype`), scales random."""
        kind = FP8 if dtype == "fp8" else getattr(torch, dtype)
        model = torch.bfloat16 if dtype == "fp8" else kind
        shape = packed_shape(rows, inner, kind.itemsize)
        padded = shape[0] * 64
        random = {"generator": self.generator, "device": "cuda"}
        if dtype == "fp8":
            inputs = {
                "x": self.bits(MAX_TOKENS, inner),
                "weight": self.bits(*shape),
                "weight_scale": (torch.rand(padded, **random) + 0.5) * inner**-0.5 / 1e4,
                "x_scale": torch.rand(1, **random) + 0.5,
            }
        else:
            inputs = {
                "x": torch.randn(MAX_TOKENS, inner, **random).to(kind),
                "weight": torch.randn(shape, **random).mul_(inner**-0.5).to(kind),
            }
        attributes: dict[str, object] = {}
        if op == "packed_linear":
            out = torch.empty(MAX_TOKENS, rows, dtype=extra.get("out", model), device="cuda")
        elif op == "packed_linear_swiglu":
            inputs["scale"] = torch.full((1,), 0.02, device="cuda")
            attributes["dtype"] = "bfloat16"
            out = torch.empty(MAX_TOKENS, rows // 2, dtype=FP8, device="cuda")
        else:
            m = extra["model"]
            out = torch.empty(MAX_TOKENS, m.heads * m.head_size, dtype=model, device="cuda")
            angle = torch.rand(MAX_TOKENS, m.head_size // 2, **random) * 6.28
            inputs["rotary"] = torch.cat((angle.cos(), angle.sin()), -1).contiguous()
            inputs["k_scale"] = torch.full((1,), 0.02, device="cuda")
            inputs["v_scale"] = torch.full((1,), 0.02, device="cuda")
            heads = ("num_heads", "num_kv_heads", "head_size")
            sizes = (m.heads, m.kv_heads, m.head_size)
            attributes = {"layer": 0, **dict(zip(heads, sizes, strict=True))}
            cache = torch.zeros(1, 16, 2, m.kv_heads, 32, m.head_size, device="cuda").to(FP8)
            self.env = replace(self.env, kv_cache=cache)
        role = "q" if op == "packed_linear_rope_kv" else "out"
        return OpCall(op, op, inputs, {role: out}, attributes)

    def launch(self, call: OpCall, tokens: int, variant: str = "") -> Launch:
        """The launch of a variant, or of the tactic."""
        if not variant:
            tiles, chunks = call.inputs["weight"].shape[:2]
            kind = str(call.inputs["x"].dtype).removeprefix("torch.")
            tactic = parse_tactic(choose_tactic(call.op, tiles, chunks, kind))
            variant = next(v for most, v in tactic if tokens <= most)
        if variant == MANY:
            return prefill_launch(call, self.env, tokens)
        return decode_launch(call, self.env, tokens, DecodeVariant.parse(variant))

    def prepare(self, launch: Launch):
        """A prepared launch; calling it with a stream enqueues it."""
        name = launch.spec.name
        if name not in self.loaded:
            self.loaded[name] = self.driver.load(compile_kernel(launch.spec))
        self.keep.append(launch)
        return self.driver.prepare(self.loaded[name], launch.grid, launch.arguments, self.use_pdl)

    def compile(self, launches: list[Launch]) -> None:
        """Compile at once what is not loaded yet."""
        specs = {launch.spec.name: launch.spec for launch in launches}
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(compile_kernel, specs.values()))

    def run(self, launch: Launch) -> None:
        """Launch once and wait."""
        self.prepare(launch)(self.stream.cuda_stream)
        self.stream.synchronize()

    def time(self, launches: list[Launch], repeats: int = 7) -> float:
        """Median microseconds of the whole chain in a graph."""
        prepared = [self.prepare(launch) for launch in launches]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for enqueue in prepared:
                enqueue(self.stream.cuda_stream)
            self.stream.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(2):
                    for enqueue in prepared:
                        enqueue(self.stream.cuda_stream)
            for _ in range(5):  # the first milliseconds of a process run slower
                graph.replay()
            times = []
            for _ in range(repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 500)
        del self.keep[:]
        return statistics.median(times)


def read_rate(bench: Bench) -> float:
    """TB/s of a plain streaming read (a float32 sum) of 4 GB."""
    data = torch.ones(1 << 30, device="cuda")
    best = 1e9
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return data.nbytes / best / 1e9


def wanted(call: OpCall, tokens: int) -> torch.Tensor:
    """A plain product in float64."""
    rows, inner = call.inputs["weight"].shape[0] * 64, call.inputs["x"].shape[1]
    weight = restore(unpack(call.inputs["weight"], rows, inner), plain_order(rows)).double()
    y = call.inputs["x"][:tokens].double() @ weight.T
    if "weight_scale" in call.inputs:
        y = y * (call.inputs["x_scale"] * call.inputs["weight_scale"]).double()
    return y


def check(bench: Bench) -> None:
    """Products against float64, and equal bits over token counts and variants."""
    cases = [
        ("fp8", 8192, 2048),
        ("fp8", 1024, 8192),
        ("fp8", 320, 28672),
        ("fp8", 10240, 8192),
        ("bfloat16", 640, 4096),
    ]
    for dtype, rows, inner in cases:
        call = bench.call("packed_linear", rows, inner, dtype)
        out = call.outputs["out"]
        reference = wanted(call, 64)
        variants = ["n8r1c1s11k1g0l0", "n8r1c4s3k1g0l0", "n8r2c1s6k1g7l0", "n8r4c1s3k1g3l0",
                    "n16r1c1s10k1g0l4", "n16r2c2s3k1g0l0", "n24r1c1s8k1g0l0", "n32r1c1s8k1g0l0",
                    "n64r1c1s6k1g0l0", "n8r1c1s12k0g0l0",
                    "n16r1c2s8k0g131l0", "n64r1c1s9k0g0l0", MANY]  # fmt: skip
        if dtype == "fp8":
            variants += ["n8r1c1s8k2g0l0", "n8r1c4s2k4g0l0", "n8r2c1s4k4g0l0", "n16r1c2s3k2g0l0",
                         "n16r1c2s3k4g0l0"]  # fmt: skip
        tiles, chunks = call.inputs["weight"].shape[:2]
        variants = [
            v
            for v in variants
            if v == MANY or DecodeVariant.parse(v).fits(tiles, chunks, dtype == "fp8")
        ]
        bench.compile([bench.launch(call, 1, variant) for variant in variants])
        first = None
        for variant, tokens in itertools.product(variants, (1, 11, 64)):
            if "k0" in variant and tokens > DecodeVariant.parse(variant).tokens:
                continue  # equal shares hold one token tile
            out.view(torch.uint8).fill_(0x7F)
            torch.cuda.synchronize()
            try:
                bench.run(bench.launch(call, tokens, variant))
            except Exception as error:
                print("FAILED", dtype, rows, inner, variant, tokens, str(error)[:200])
                raise
            error = (out[:tokens].double() - reference[:tokens]).norm() / reference[:tokens].norm()
            if first is None:
                bench.run(bench.launch(call, 64, variant))
                first = out.clone()
                bench.run(bench.launch(call, tokens, variant))
            same = torch.equal(out[:tokens].view(torch.int16), first[:tokens].view(torch.int16))
            rest = bool((out[tokens:].view(torch.uint8) == 0x7F).all())
            if not same or error > 5e-3 or not (rest or variant == variants[0]):
                print("BAD", dtype, rows, inner, variant, tokens, f"{error:.2e}", same, rest)
        print(f"checked {dtype} {rows}x{inner}: error {error:.1e}", flush=True)


def layer(bench: Bench, m: Model) -> list[OpCall]:
    """The four products of one layer."""
    qkv = (m.heads + 2 * m.kv_heads) * m.head_size
    return [
        bench.call("packed_linear_rope_kv", qkv, m.hidden, model=m),
        bench.call("packed_linear", m.hidden, m.heads * m.head_size),
        bench.call("packed_linear_swiglu", 2 * m.inner, m.hidden),
        bench.call("packed_linear", m.hidden, m.inner),
    ]


def report(name: str, us: float, size: int, limit: float) -> None:
    """One row."""
    rate = size / us / 1e6
    print(f"{name:44s} {us:8.2f} us {rate:6.3f} TB/s {rate / limit:6.1%}", flush=True)


def weight_bytes(calls: list[OpCall]) -> int:
    return sum(call.inputs["weight"].nbytes for call in calls)


def main() -> None:
    """Parse options; check; time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--models", default="70b,8b,1b")
    parser.add_argument("--tokens", default="1,8,11,16")
    parser.add_argument(
        "--sweep", help="op index (0 to 3) and variants: 2=n8r1c1s11k1g0l0,...", nargs="*"
    )
    parser.add_argument("--chain", action="append", default=[], help="four variants with /")
    parser.add_argument("--subset", nargs="*", help="chains of some of the products: 0,1 2,3")
    parser.add_argument("--head", action="store_true")
    options = parser.parse_args()
    bench = Bench()
    limit = read_rate(bench)
    for i, chain in enumerate(["///", *options.chain]):
        print(f"chain {i}: {chain}")
    print(f"{torch.cuda.get_device_name()}: plain read {limit:.3f} TB/s", flush=True)
    if options.check:
        check(bench)
    for name in filter(None, options.models.split(",")):
        m = MODELS[name]
        layers = [layer(bench, m) for _ in range(m.copies)]
        for tokens in map(int, options.tokens.split(",")):
            texts = ["///", *options.chain]
            chains = [(f"chain {i}", text.split("/")) for i, text in enumerate(texts)]
            sweeps = [
                (int(item[0]), variant)
                for item in options.sweep or ()
                for variant in item[2:].split(",")
            ]
            bench.compile(
                [
                    bench.launch(c, tokens, v)
                    for _, p in chains
                    for c, v in zip(layers[0], p, strict=True)
                ]
                + [bench.launch(layers[0][index], tokens, v) for index, v in sweeps]
            )
            for text, plan in chains:
                launches = [
                    bench.launch(call, tokens, variant)
                    for calls in layers
                    for call, variant in zip(calls, plan, strict=True)
                ]
                us = bench.time(launches) / m.copies
                report(f"{name} layer M={tokens} {text}", us, weight_bytes(layers[0]), limit)
            for ops, (text, plan) in itertools.product(options.subset or (), chains):
                chosen = [int(op) for op in ops.split(",")]
                chain = [(c[op], plan[op]) for c in layers for op in chosen]
                size = weight_bytes([layers[0][op] for op in chosen])
                for bench.use_pdl in (True, False):
                    us = bench.time([bench.launch(*(c, tokens, v)) for c, v in chain]) / m.copies
                    report(
                        f"{name} ops {ops} M={tokens} pdl={bench.use_pdl} {text}", us, size, limit
                    )
                bench.use_pdl = True
            for index, variant in sweeps:
                calls = [calls[index] for calls in layers]
                us = bench.time([bench.launch(c, tokens, variant) for c in calls]) / m.copies
                what = f"{name} op {index} M={tokens} {variant}"
                report(what, us, weight_bytes(calls[:1]), limit)
        del layers
        torch.cuda.empty_cache()
    if options.head:
        for dtype, inner in (("bfloat16", 8192), ("fp8", 2048), ("bfloat16", 2048)):
            calls = [
                bench.call("packed_linear", 128256, inner, dtype, out=torch.float32)
                for _ in range(1 if inner == 8192 else 2)
            ]
            for tokens in map(int, options.tokens.split(",")):
                us = bench.time([bench.launch(c, tokens) for c in calls]) / len(calls)
                report(f"lm_head {dtype} {inner} M={tokens}", us, weight_bytes(calls[:1]), limit)


if __name__ == "__main__":
    main()
