"""Requests whose queries, keys and values are fixed, so that steps may cut them as they like.

What a kernel computes for a row must be the same bits whatever step it is part of; `World.run`
computes chosen rows in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.ops.paged_attention import kernel, launch_arguments
from llmctl.runtime.step import pack_trees
from support.kernel import step_arrays, zeros

FP8, INT8 = torch.float8_e4m3fn, torch.int8
KV_SCALES = {FP8: (0.75, 1.25), INT8: (0.021, 0.034)}
Part = tuple[int, int, int]  # request, first position, number of tokens
Execute = Callable[[Sequence[Launch]], None]


@dataclass
class World:
    """A cache that holds every key of every request, and every query."""

    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    quantize_out: bool = False
    window: int = 0
    sinks: int | None = None  # None: the window is the checkpoint's, a constant of the kernels
    tokens_per_block: int = 32
    layers: int = 1
    max_batch_size: int = 64
    max_seq_len: int = 0  # the engine's limit where it is more than the longest request
    # Parents of a request's drafts (`Drafts`): its parts of as many tokens and a root are trees.
    trees: Mapping[int, Sequence[int]] = field(default_factory=dict)
    device: str = "cpu"
    seed: int = 0
    spread: float = 1.0  # of the queries: larger makes weights more uneven
    same_queries: bool = False  # of all requests, which are of one length
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make = torch.Generator(self.device).manual_seed(self.seed)
        width, per = self.heads * self.size, self.tokens_per_block

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make, device=self.device, dtype=torch.bfloat16)

        lengths = self.lengths[:1] if self.same_queries else self.lengths
        queries = [(normal(n, width) * self.spread).to(self.dtype) for n in lengths]
        self.queries = queries * len(self.lengths) if self.same_queries else queries
        needed = [-(-n // per) for n in self.lengths]
        blocks = sum(needed) + 3  # some that nobody uses
        shape = (blocks, 2, self.kv_heads, per, self.size)
        self.cache = torch.empty((self.layers, *shape), device=self.device, dtype=self.kv_dtype)
        for layer in self.cache:  # layer by layer: a large cache has no room for a wider copy
            values = normal(*shape)
            if self.kv_dtype == INT8:
                values = (values * 40).round().clamp(-127, 127)
            layer.copy_(values.to(self.kv_dtype))
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed))
        self.tables = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count], order = order[:count], order[count:]
        scales = dict(zip(("k_scale", "v_scale"), KV_SCALES.get(self.kv_dtype, ()), strict=False))
        if self.quantize_out:
            scales["out_scale"] = 2.0 / 448
        self.scales = {k: torch.tensor([v], device=self.device) for k, v in scales.items()}

    def fill_unused(self, byte: int) -> None:
        """Every byte of the cache that no request's context has is this one."""
        used = torch.zeros(self.cache.shape[1], self.tokens_per_block, dtype=torch.bool)
        for table, length in zip(self.tables, self.lengths, strict=True):
            positions = torch.arange(length)
            blocks = table[positions // self.tokens_per_block].long()
            used[blocks, positions % self.tokens_per_block] = True
        cache = self.cache.view(torch.uint8)
        cache[~used[None, :, None, None, :, None].expand(cache.shape)] = byte

    @property
    def attributes(self) -> dict[str, int | float | str | bool]:
        """Those of the operator, for layer 0."""
        sinks = {} if self.sinks is None else {"sink_tokens": self.sinks}
        return {
            **sinks,
            "layer": 0,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_size": self.size,
            "softmax_scale": self.size**-0.5,
            "window": self.window,
        }

    def limits(self) -> StepLimits:
        """An engine's limits that every step here keeps."""
        return StepLimits(
            max_num_tokens=8192,
            max_num_rows=8192,
            max_batch_size=self.max_batch_size,
            max_seq_len=max(self.max_seq_len, *self.lengths),
            max_draft_len=max([16, *map(len, self.trees.values())]),
            tokens_per_block=self.tokens_per_block,
            kv_dtype=str(self.kv_dtype).removeprefix("torch."),
        )

    def step(self, parts: Sequence[Part]) -> StepInputs:
        """The packed step of these parts; kv_len is where each part ends."""
        cu_q = torch.cumsum(torch.tensor([0, *(count for _, _, count in parts)]), 0).int()
        positions = [torch.arange(start, start + count).int() for _, start, count in parts]
        kv_len = torch.tensor([start + count for _, start, count in parts]).int()
        tokens = int(cu_q[-1])
        zeros = torch.zeros(tokens, dtype=torch.int32)
        found = [self.trees.get(request, ()) for request, *_ in parts]
        parents = [p if len(p) + 1 == n else () for p, (*_, n) in zip(found, parts, strict=True)]
        packed = torch.cat(positions).numpy()
        trees = pack_trees(parents, cu_q.numpy(), packed) if any(parents) else None
        return StepInputs(
            token_ids=zeros.numpy(),
            position_ids=packed,
            cu_q=cu_q.numpy(),
            kv_len=kv_len.numpy(),
            block_tables=self.tables[[request for request, _, _ in parts]].numpy(),
            slot_mapping=zeros.numpy(),
            logit_rows=zeros[:1].numpy(),
            trees=trees,
        )

    def call(self, parts: Sequence[Part], padding: int = 0) -> OpCall:
        """The parts' queries, then `padding` tokens of no request; the output starts as 0x55."""
        rows = [self.queries[r][start : start + count] for r, start, count in parts]
        rows.append(torch.full((padding, self.heads * self.size), torch.nan).to(rows[0]))
        q = torch.cat(rows)
        out = torch.empty_like(q, dtype=FP8 if self.quantize_out else self.dtype)
        out.view(torch.uint8).fill_(0x55)
        inputs = {"q": q, **self.scales}
        return OpCall("paged_attention", "attention", inputs, {"out": out}, self.attributes)

    def env(self, step: StepInputs, padding: int = 0) -> LaunchEnv:
        """The step's arrays on the device, with padding requests of no tokens at the end."""

        def array(name: str, numbers: NDArray[np.int32]) -> torch.Tensor:
            values = torch.from_numpy(numbers)
            if name in ("cu_q", "kv_len", "tree_start", "tree_root", "context_end") and padding:
                last = values[-1:] * (name not in ("kv_len", "context_end"))
                values = torch.cat((values, last.expand(padding)))
            if name == "block_tables" and padding:
                values = torch.cat((values, values[:1].expand(padding, -1)))
            return values.contiguous().to(self.device)

        def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if name not in self.scratch:
                self.scratch[name] = zeros(shape, dtype, self.device)
            assert self.scratch[name].shape == shape
            return self.scratch[name]

        arrays = {name: array(name, numbers) for name, numbers in step_arrays(step).items()}
        is_cuda = self.device != "cpu"  # else interpreted
        on_device = DeviceStep(**arrays)
        return LaunchEnv(on_device, self.cache, self.limits(), "tokens", scratch, is_cuda)

    def shape(self, step: StepInputs, **bounds: int) -> StepShape:
        """The step's extents; `bounds` replace some, as captured graphs do."""
        lens = step.cu_q[1:] - step.cu_q[:-1]
        exact = StepShape(
            *(step.num_tokens, step.num_requests, step.num_rows),
            int(lens.max()),
            int(step.kv_len.max()),
            self.limits().max_draft_len + 1 if step.trees else 0,
            int((lens == 1).sum()),
        )
        return changed(exact, **bounds)

    def run(
        self,
        parts: Sequence[Part],
        execute: Execute,
        padding: tuple[int, int] = (0, 0),
        **bounds: int,
    ) -> list[torch.Tensor]:
        """Attend for the parts in one step with (tokens, requests) of padding: a tensor a part."""
        step, call = self.step(parts), self.call(parts, padding[0])
        counts = {
            "num_tokens": step.num_tokens + padding[0],
            "num_requests": step.num_requests + padding[1],
        }
        shape = self.shape(step, **{**counts, **bounds})
        execute(kernel.launches(call, self.env(step, padding[1]), shape))
        for name, tensor in self.scratch.items():
            if name.endswith("counters"):
                assert not tensor.any(), "a counter is not back at zero"
        out = call.outputs["out"]
        if padding[0]:
            assert (out[-padding[0] :].view(torch.uint8) == 0x55).all(), "padding was written"
        return list(out[: step.num_tokens].split([count for _, _, count in parts]))


def with_outputs(worlds: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Each of them, and whether attention quantizes its output: engines do where the cache is FP8,
    so only there both."""
    return [
        (world, quantizes)
        for world in worlds
        for quantizes in ([False, True] if world.get("kv_dtype") == FP8 else [False])
    ]


def run_one(
    launch: Launch, call: OpCall, env: LaunchEnv, parts: Sequence[Part], execute: Execute
) -> list[torch.Tensor]:
    """The rows of the parts by one kernel alone; behind them the call has tokens of padding."""
    execute([launch])
    assert not launch_arguments.partials(call, env)[1].any(), "a counter is not back at zero"
    counts = [count for _, _, count in parts]
    out, padding = call.outputs["out"].split((sum(counts), len(call.outputs["out"]) - sum(counts)))
    assert len(padding) and (padding.view(torch.uint8) == 0x55).all(), "padding was written"
    return list(out.split(counts))


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal as bytes."""
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def variations(length: int, other: int) -> list[tuple[list[Part], dict[str, int]]]:
    """Ways to compute rows of request 0 (and of request 1 beside it), with bounds of the step."""
    last = length - 1
    edge = length // 2
    ways: list[tuple[list[Part], dict[str, int]]] = [
        ([(0, last, 1)], {}),
        ([(0, last, 1)], {"max_kv_len": 1}),  # no splits
        ([(0, last, 1)], {"max_kv_len": 1 << 17}),
        ([(0, edge, 1), (1, other - 1, 1)], {}),
        ([(0, last - 10, 11)], {}),
        ([(0, last - 10, 11)], {"max_kv_len": 1}),
        ([(0, last - 16, 17)], {}),
        ([(1, other - 1, 1), (0, last - 4, 5)], {}),
        ([(0, length - 64, 64)], {}),
        ([(0, length - 30, 30), (1, other - 3, 3)], {}),
        ([(0, 0, edge), (1, other - 1, 1)], {}),
        ([(0, edge, length - edge), (1, 0, other)], {}),
    ]
    ways += [([(0, position, 1)], {}) for position in (0, 1, 63, 64, 127, 128, edge - 1)]
    return ways


def mismatches(world: World, execute: Execute) -> list[str]:
    """Which variations differ in some bit from computing each request's rows in one chunk."""
    wanted = [world.run([(r, 0, n)], execute)[0] for r, n in enumerate(world.lengths[:2])]
    wrong = []
    for parts, bounds in variations(*world.lengths[:2]):
        rows = world.run(parts, execute, (3, 2), **bounds)
        for (request, start, count), found in zip(parts, rows, strict=True):
            if not same_bits(found, wanted[request][start : start + count]):
                wrong.append(f"{parts} {bounds}: request {request}")
    return wrong


# What attention by warps (batch.cu, verification.cu) does not cover, of a model with 64 heads.
NOT_BY_WARP = (
    {"window": 100},
    {"size": 96},
    {"tokens_per_block": 24},
    {"tokens_per_block": 4},
    {"kv_heads": 2},  # 32 query heads each
)


def short_launch(world: World, requests: int, tokens: int, max_kv_len: int) -> Launch:
    """What a step of short requests launches on a GPU."""
    parts = [(0, 64 - tokens, tokens)] * requests
    step = world.step(parts)
    env = changed(world.env(step), use_pdl=True)
    (launch,) = kernel.launches(world.call(parts), env, world.shape(step, max_kv_len=max_kv_len))
    return launch
