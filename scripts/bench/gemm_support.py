"""What the benchmarks of packed products share: calls on random data, and timing in graphs."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, Launch, LaunchEnv, StepLimits
from llmctl.plugins.backends.cuda.read_rate import elapsed_ms
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.ops.packed_linear.layout import packed_shape
from llmctl.plugins.schemes.scheme import Form, packing_of
from llmctl.plugins.schemes.table import FORMS, SCHEMES

FP8 = torch.float8_e4m3fn
MAX_TOKENS = 256
LIMITS = StepLimits(MAX_TOKENS, MAX_TOKENS, 16, 4096, 127, 32, "float8_e4m3fn")


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
            ints(MAX_TOKENS), ints(16), ints(16), ints(1, 1), ints(16),
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

    def codes(self, form: Form, rows: int, inner: int) -> torch.Tensor:
        """A random packed weight of codes."""
        tiles, chunks = -(-rows // TILE_ROWS), -(-inner // form.columns)
        shape = (tiles, chunks, TILE_ROWS, form.block_bytes // TILE_ROWS)
        packed = torch.empty(shape, dtype=getattr(torch, form.dtype), device="cuda")
        packing_of(form).fill_random(packed, self.generator)
        return packed

    def call(self, op: str, rows: int, inner: int, dtype: str = "fp8", **extra: Any) -> OpCall:
        """A call of the given packed rows and K, scales random. dtype: torch's name of both sides,
        or a scheme of the weight, where x is FP8."""
        form = SCHEMES[dtype].forms[0] if dtype in SCHEMES else FORMS[dtype]
        is_quantized = form.numbers == "float8_e4m3fn"
        kind = FP8 if is_quantized else getattr(torch, dtype)
        model = torch.bfloat16 if is_quantized else kind
        shape = packed_shape(rows, inner, kind.itemsize)
        padded = shape[0] * 64
        random = {"generator": self.generator, "device": "cuda"}
        if is_quantized:
            inputs = {
                "x": self.bits(MAX_TOKENS, inner),
                "weight": self.codes(form, rows, inner) if form.is_coded else self.bits(*shape),
                "weight_scale": (torch.rand(padded, **random) + 0.5) * inner**-0.5 / 1e4,
                "x_scale": torch.rand(1, **random) + 0.5,
            }
        else:
            inputs = {
                "x": torch.randn(MAX_TOKENS, inner, **random).to(kind),
                "weight": torch.randn(shape, **random).mul_(inner**-0.5).to(kind),
            }
        attributes: dict[str, object] = dict(form.attributes)
        if op == "packed_linear":
            out = torch.empty(MAX_TOKENS, rows, dtype=extra.get("out", model), device="cuda")
        elif op == "packed_linear_swiglu":
            inputs["scale"] = torch.full((1,), 0.02, device="cuda")
            attributes["dtype"] = "bfloat16"
            out = torch.empty(MAX_TOKENS, rows // 2, dtype=FP8, device="cuda")
        else:
            m = extra["model"]
            out = torch.empty(MAX_TOKENS, m.heads * m.head_size, dtype=model, device="cuda")
            positions = max(MAX_TOKENS, LIMITS.max_seq_len)  # chains have a context before them
            angle = torch.rand(positions, m.head_size // 2, **random) * 6.28
            inputs["rotary"] = torch.cat((angle.cos(), angle.sin()), -1).contiguous()
            inputs["k_scale"] = torch.full((1,), 0.02, device="cuda")
            inputs["v_scale"] = torch.full((1,), 0.02, device="cuda")
            heads = ("num_heads", "num_kv_heads", "head_size")
            sizes = (m.heads, m.kv_heads, m.head_size)
            attributes |= {"layer": 0, **dict(zip(heads, sizes, strict=True))}
            cache = torch.zeros(1, 16, 2, m.kv_heads, 32, m.head_size, device="cuda").to(FP8)
            self.env = replace(self.env, kv_cache=cache)
        role = "q" if op == "packed_linear_rope_kv" else "out"
        return OpCall(op, op, inputs, {role: out}, attributes)

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
            times = elapsed_ms(graph.replay, repeats)
        del self.keep[:]
        return statistics.median(times) * 500


def layer(bench: Bench, m: Model, dtype: str = "fp8") -> list[OpCall]:
    """The four products of one layer."""
    qkv = (m.heads + 2 * m.kv_heads) * m.head_size
    return [
        bench.call("packed_linear_rope_kv", qkv, m.hidden, dtype, model=m),
        bench.call("packed_linear", m.hidden, m.heads * m.head_size, dtype),
        bench.call("packed_linear_swiglu", 2 * m.inner, m.hidden, dtype),
        bench.call("packed_linear", m.hidden, m.inner, dtype),
    ]
