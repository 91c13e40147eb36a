"""The plan of an engine: what the runtime executes each step, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from llmctl.builder.container import DTYPES
from llmctl.builder.validation import strict_json
from llmctl.plugins.core.fused_calls import FusedCalls
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens

# "tokens": rows of the packed step; "rows": rows that get logits; "requests" and "beams": of heads
# that compute one row for each sequence, and one for each beam of each sequence
Dim = int | str
BASE = "base"  # the graph that every engine has: tokens in, logits out
TENSORRT_OP = "tensorrt"  # an operator of a plan that runs one of its `trt_pieces`
# Names of what is machine code in an engine file: our kernels, and TensorRT's plans.
CODE_PREFIXES = _KERNEL, _TRT_PLAN = "kernel:", "plan:"


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """A value of the plan. dtype is torch's name: float32, bfloat16, float16, float8_e4m3fn, int32.

    Weights live in the engine file under `name`, unless `is_stored` is false: then `Plan.rotary`
    defines them, or the engine says how to generate them (`EngineConfig.weights`). Activations
    live in one arena at `offset` bytes, sized for max_num_tokens (and max_num_rows), and share
    space when their lifetimes allow.
    """

    name: str
    kind: Literal["weight", "activation"]
    dtype: str
    shape: tuple[Dim, ...]
    offset: int | None = None
    is_stored: bool = True


@dataclass(frozen=True, slots=True)
class PlanRotary:
    """What a table of cosines and sines is computed from when the engine is loaded
    (`plugins.ops.rope_kv_write.table`); the tensor's shape says for how many positions.

    Both are float32 numbers: `frequencies` radians a position, one for each half of a head;
    `factor` of all cosines and sines.
    """

    frequencies: tuple[float, ...]
    factor: float


@dataclass(frozen=True, slots=True)
class PlanOp:
    """One kernel launch: `op` names a folder of `plugins/`, roles map to tensor names."""

    op: str
    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    tactic: str = ""  # the kernel chosen at build, e.g. "cpu.linear.fp8"


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """One compiled kernel. Its cubin is the engine file's uint8 tensor `tensor`.

    `metadata` is that of `plugins.backends.cuda.compiler.CompiledKernel`: how to launch it, what it
    uses. `capability` says for which GPU, where an engine serves several.
    """

    name: str
    num_bytes: int
    metadata: Mapping[str, Any]
    capability: str = ""

    @property
    def tensor(self) -> str:
        """The name of the cubin in the engine file."""
        capability = f"{self.capability}:" if self.capability else ""
        return f"{_KERNEL}{capability}{self.name}"


@dataclass(frozen=True, slots=True)
class TrtPiece:
    """One plan of TensorRT. Its bytes are the engine file's uint8 tensor `tensor`.

    bindings: {name, is_input, dtype, shape, alias} of each; an alias names the input whose memory
    an output shares. profiles: {name, sizes: {dimension: [least, tuned for, most]}, layers,
    activation_bytes, scratch_bytes} of each optimization profile, as the builder reported them.
    """

    name: str
    num_bytes: int
    package: str  # the import name of the package that built it
    version: str
    bindings: tuple[Mapping[str, Any], ...]
    profiles: tuple[Mapping[str, Any], ...]

    @property
    def tensor(self) -> str:
        """The name of the plan in the engine file."""
        return f"{_TRT_PLAN}{self.name}"


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The paged cache: [num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size].

    `windows` has one entry a layer: the attention window in tokens, 0 for full attention.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    tokens_per_block: int
    dtype: str
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanGraph:
    """A graph of the plan: operators in order, and by name the tensors that it reads from outside
    and those that it is run for.

    An input that is an output of another graph is there once that one ran; whoever runs this graph
    writes the others. Inputs and outputs keep their bytes until the base graph runs again; what a
    graph computes on the way lies where other graphs have theirs. A graph that attends has the
    cache that `cache` names (`Plan.head_caches`); several may share it.
    """

    ops: tuple[PlanOp, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    cache: str = ""  # "": the base graph's, or none

    @property
    def is_over_ranks(self) -> bool:
        """Whether ranks compute it together: each gathers what the others have."""
        return any(op.attributes.get("ranks", 1) != 1 for op in self.ops)


@dataclass(frozen=True, slots=True)
class Plan:
    """What an executable runs each step, in order.

    `outputs` are tensors that hold what a step computed until the next one, by name: "logits"
    [rows, vocab_size] float32, and what else was asked for when the engine was built. `heads` are
    graphs beside this one, the base graph: they share its weights and its arena.
    """

    tensors: tuple[PlanTensor, ...]
    ops: tuple[PlanOp, ...]
    kv_cache: KvCacheSpec
    outputs: Mapping[str, str]
    arena_bytes: int
    max_num_tokens: int
    max_num_rows: int
    kernels: tuple[PlanKernel, ...] = ()  # cuda: every binary that a step or a round may launch
    scratch_bytes: int = 0  # cuda: the most that kernels request of `LaunchEnv.scratch`
    trt_pieces: tuple[TrtPiece, ...] = ()  # tensorrt: what its operators "tensorrt" run
    fused: tuple[FusedCalls, ...] = ()  # cuda: of `ops`, what one launch may do instead; first wins
    heads: Mapping[str, PlanGraph] = field(default_factory=dict)  # by name
    max_num_requests: int = 0  # sequences of a step; 0: of an older engine, which has none such
    max_num_beams: int = 0  # beams of all of them; 0: no head computes several rows of a sequence
    head_caches: Mapping[str, KvCacheSpec] = field(default_factory=dict)  # of heads that attend
    rotary: Mapping[str, PlanRotary] = field(default_factory=dict)  # tables, by their tensors

    @property
    def sizes(self) -> dict[str, int]:
        """What the symbolic dimensions stand for, at most."""
        sizes = {"tokens": self.max_num_tokens, "rows": self.max_num_rows}
        if self.max_num_requests:
            sizes["requests"] = self.max_num_requests
        if self.max_num_beams:
            sizes["beams"] = self.max_num_beams
        return sizes

    @property
    def fp8_tokens(self) -> Fp8Tokens:
        """Whose attention has FP8 products (plugins/ops/paged_attention)."""
        found = [
            kind for op in self.ops if (kind := fp8_tokens(op.attributes)) is not Fp8Tokens.NONE
        ]
        return found[0] if found else Fp8Tokens.NONE  # `build` has one kind in all layers

    @property
    def logits(self) -> str:
        """The tensor of the logits."""
        return self.outputs["logits"]

    @property
    def graphs(self) -> dict[str, PlanGraph]:
        """Every graph by name, the base graph first."""
        return {BASE: PlanGraph(self.ops, {}, self.outputs), **self.heads}

    @property
    def head_shares(self) -> tuple[int, int] | None:
        """(ranks, ids of each) of the logits of heads, where ranks have shares of them."""
        widths = {tensor.name: tensor.shape[-1] for tensor in self.tensors}
        for graph in self.heads.values():
            for op in graph.ops:
                if op.op == "all_gather" and "to_all" not in op.attributes:
                    return int(op.attributes["ranks"]), int(widths[op.inputs["x"]])
        return None

    @property
    def caches(self) -> dict[str, KvCacheSpec]:
        """Every KV cache by name, the base graph's first, which has none. Sequences have one block
        table for all."""
        return {"": self.kv_cache, **self.head_caches}

    def given_inputs(self, name: str) -> dict[str, str]:
        """Those inputs of a graph that no graph computes."""
        computed = {tensor for graph in self.graphs.values() for tensor in graph.outputs.values()}
        inputs = self.graphs[name].inputs.items()
        return {name: tensor for name, tensor in inputs if tensor not in computed}

    def to_json(self) -> str:
        """The plan as strict JSON (no NaN)."""
        return json.dumps(self, default=_fields, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on foreign content."""
        raw: dict[str, Any] = strict_json.parse(text)
        tensors = tuple(PlanTensor(**{**t, "shape": tuple(t["shape"])}) for t in raw.pop("tensors"))
        ops = tuple(PlanOp(**op) for op in raw.pop("ops"))
        spec = _read_cache(raw.pop("kv_cache"))
        kernels = tuple(PlanKernel(**kernel) for kernel in raw.pop("kernels"))
        pieces = tuple(
            TrtPiece(**{**p, "bindings": tuple(p["bindings"]), "profiles": tuple(p["profiles"])})
            for p in raw.pop("trt_pieces", ())  # absent in engines built before these existed
        )
        fused = tuple(FusedCalls(**each) for each in raw.pop("fused"))
        heads = {
            name: PlanGraph(**{**head, "ops": tuple(PlanOp(**op) for op in head["ops"])})
            for name, head in raw.pop("heads").items()
        }
        caches = raw.pop("head_caches", {})  # absent in engines built before these existed
        rotary = {
            name: PlanRotary(**{**each, "frequencies": tuple(each["frequencies"])})
            for name, each in raw.pop("rotary").items()
        }
        return Plan(
            tensors,
            ops,
            spec,
            kernels=kernels,
            trt_pieces=pieces,
            fused=fused,
            heads=heads,
            head_caches={name: _read_cache(cache) for name, cache in caches.items()},
            rotary=rotary,
            **raw,
        )


def _fields(part: Any) -> dict[str, Any]:
    """A part of a plan for JSON. `asdict` would copy every part first: most of the time."""
    return {each.name: getattr(part, each.name) for each in fields(part)}


def _read_cache(raw: Mapping[str, Any]) -> KvCacheSpec:
    return KvCacheSpec(**{**raw, "windows": tuple(raw["windows"])})


def weight_sizes(plan: Plan) -> dict[str, int]:
    """Bytes of each weight, stored and generated ones."""
    weights = (t for t in plan.tensors if t.kind == "weight")
    return {t.name: math.prod(map(int, t.shape)) * DTYPES[t.dtype][1] for t in weights}


def weight_bytes(plan: Plan) -> int:
    """Bytes of all weights."""
    return sum(weight_sizes(plan).values())


def trt_memory_bytes(plan: Plan) -> int:
    """Device memory that TensorRT's pieces work in: they run one after another and share it."""
    profiles = [profile for piece in plan.trt_pieces for profile in piece.profiles]
    return max((int(profile["activation_bytes"]) for profile in profiles), default=0)


def kv_bytes_per_token(plan: Plan) -> int:
    """Bytes of KV cache one token takes over all layers, those of heads included."""
    return sum(
        2 * cache.num_layers * cache.num_kv_heads * cache.head_size * DTYPES[cache.dtype][1]
        for cache in plan.caches.values()
    )
