"""Attention within layers.cu, thread by thread on a CPU: the bits of batch.cu in contexts whose
work items have one, two, four and eight tiles, layer after layer, and nothing written elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import cuda_samples, emulated_warps
from support.attention import FP8, World, run_one

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, TensorMap
from llmctl.plugins.ops.paged_attention import launch_arguments
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT, UNIT, count_units

SOURCE = Path(cuda_samples.__path__[0]) / "attend_layers.cu"
LAYERS = 3
BOUND = 4096  # tokens of a context
GROUP, PAGE, WIDTH = 4, 32, 1024  # WIDTH: of a token, here also between products
STAGE_BYTES, APART = 32768, 4096
NAN = 0xFF  # every byte of one


@dataclass(frozen=True)
class Form:
    """How tiles of a work item follow each other, by macros of layers.cu."""

    slots: int
    held: int
    blocks: int = 32  # those of 32 merge eight pairs of dimensions each, as those of 1B do
    kv_heads: int = 2
    dtype: torch.dtype = FP8
    size: int = 64
    bound: int = BOUND  # of contexts that the binary is for
    stages: int = 4  # of the ring


PAIR = Form(2, 1)  # the first two tiles side by side
WIDE = Form(1, 0, size=128)
LENT = replace(WIDE, bound=2048)  # side by side, too, the second in the slot of the other team
LONG = Form(1, 0, bound=8192, stages=6)  # tiles come through the ring
CASES = [
    *((PAIR, context, 1, 0) for context in (65, 1025, 1100, 2300)),
    (PAIR, 1500, 2, 0),
    (PAIR, 1100, 1, 1),
    (Form(2, 1, blocks=5), 2300, 1, 0),  # five work items to a team
    (Form(2, 1, dtype=torch.bfloat16), 1100, 1, 0),
    (Form(2, 2), 1500, 2, 0),  # a tile behind the other, each in its slot
    (Form(1, 0), 2300, 1, 0),  # the second tile waits in registers
    (Form(1, 2), 1500, 2, 0),  # one slot
    *((replace(PAIR, bound=1024), context, 1, 0) for context in (65, 1024)),
    (replace(PAIR, bound=2048), 1500, 1, 0),
    *((WIDE, context, 1, 0) for context in (1100, 2300)),
    *((LENT, context, 1, 0) for context in (65, 1024, 1025, 1100, 1500, 2048)),
    (replace(LENT, blocks=17), 1500, 1, 0),  # too few blocks to lend
    *((LONG, context, 1, 0) for context in (65, 1025, 2300, 5120)),
    *((LONG, 4097, 2, 0), (LONG, 4097, 1, 1)),  # the last two keys in groups of two blocks
    (replace(LONG, blocks=17, bound=65536), 40000, 2, 0),  # page numbers in turns, two warps add
    *((replace(LONG, size=128, blocks=blocks), 5000, 1, 0) for blocks in (17, 32)),
    (replace(LONG, dtype=torch.bfloat16, blocks=17), 5000, 1, 0),
]


class Request:
    """One whose last tokens' attention runs as in layers.cu, in each of a few layers."""

    def __init__(self, form: Form, context: int, tokens: int, padding: int) -> None:
        self.form, self.context, self.tokens, self.most = form, context, tokens, tokens + padding
        self.heads = form.kv_heads * GROUP
        self.worlds = [
            World(self.heads, form.kv_heads, form.size, (context,), kv_dtype=form.dtype, spread=2.0,
                  quantize_out=True, tokens_per_block=PAGE, max_seq_len=form.bound, seed=layer)
            for layer in range(LAYERS)
        ]  # fmt: skip
        for world in self.worlds:
            world.tables = self.worlds[0].tables  # those of the first serve all layers
            world.fill_unused(NAN)
        self.part = (0, context - tokens, tokens)

    def by_batch(self) -> torch.Tensor:
        """[layers, tokens, heads * size] as batch.cu computes it, the bytes of FP8."""
        found = []
        for world in self.worlds:
            call, env = world.call([self.part], 2), world.env(world.step([self.part]), 1)
            own = launch_arguments.own_tensors(call, env), launch_arguments.partials(call, env)
            scale = launch_arguments.logit_scale(call)
            with mock.patch.object(batch, "_num_warps", lambda *_: 1):
                launch = batch.batch_launch(call, env, 2, self.tokens, self.form.bound, *own, scale)
            found += run_one(launch, call, env, [self.part], emulated_warps.run)
        return torch.stack(found).view(torch.uint8)

    def take_given(self, world: World) -> torch.Tensor:
        """What QKV gives of the step's tokens, as bytes; taken out of queries and cache."""
        queries = torch.zeros(self.most, self.heads * self.form.size, dtype=world.dtype)
        queries[: self.tokens] = world.queries[0][-self.tokens :]
        if self.form.dtype == FP8:
            queries = queries.half()
        cached = torch.zeros(
            self.most, 2, self.form.kv_heads, self.form.size, dtype=self.form.dtype
        )
        for token, position in enumerate(range(self.context - self.tokens, self.context)):
            its = world.cache[0, world.tables[0, position // PAGE], :, :, position % PAGE]
            cached[token] = its
            its.view(torch.uint8).fill_(NAN)
        return ~torch.cat([queries.view(torch.uint8).flatten(), cached.view(torch.uint8).flatten()])

    def spec(self, exchange_bytes: int) -> KernelSpec:
        """Of attend_layers.cu."""
        form = self.form
        tiles = 2 * form.slots * 2 * KEYS * form.size * form.dtype.itemsize
        is_long, stages = form.bound > BOUND, form.stages
        room = max(tiles, 32 << 10 if is_long else 16 << 10)
        shared_bytes = stages * STAGE_BYTES + room + 2048
        return KernelSpec(
            name=f"attend_layers.{form}.{self.most}",
            source=str(SOURCE),
            arguments=("*i64", "i32", *["*u8"] * 2, *["*i32"] * 4, "*u8", *["*i32"] * 2,
                       "fp32", "i32", *(("tensor_map", "*u8") if is_long else ())),
            constants={
                "MXFP4": 0, "MODEL_TYPE": "BF16",
                "KV_TYPE": "E4M3" if form.dtype == FP8 else "BF16",
                "HIDDEN": WIDTH, "INTERMEDIATE": WIDTH, "NUM_HEADS": self.heads,
                "NUM_KV_HEADS": form.kv_heads, "HEAD_SIZE": form.size, "TOKENS_PER_BLOCK": PAGE,
                "O_GROUP": 16, "DOWN_GROUP": 16, "TOKENS": self.most, "NUM_BLOCKS": form.blocks,
                "STAGES": stages, "IN_FLIGHT_SMALL": 4, "IN_FLIGHT_AHEAD": 4, "IN_FLIGHT": 5,
                "EARLY_QKV": 8, "HELD": form.held, "ROOM": room,
                "SLOTS": form.slots, "MAX_UNITS": count_units(form.bound), "UNIT": UNIT,
                "MOST_UNIT": MOST_UNIT, "EXCHANGE_BYTES": exchange_bytes,
                "SHARED_BYTES": shared_bytes,
            },
            entry="attend_layers",
            num_warps=12 if is_long else 8,
            shared_bytes=shared_bytes,
        )  # fmt: skip

    def run(self, given: torch.Tensor, seed: int, *, is_late: bool) -> torch.Tensor:
        """[layers, tokens, heads * size], with assertions on all that is written."""
        form, env = self.form, self.worlds[0].env(self.worlds[0].step([self.part]))
        token = 2 * form.kv_heads * form.size * form.dtype.itemsize
        values = self.most * (3 * self.heads * self.form.size + token + 5 * WIDTH)
        states = form.kv_heads * count_units(form.bound) * 8 * (8 + 4 * form.size)
        room = torch.zeros(2 * APART + 2 * (values + states), dtype=torch.uint8)
        room[:APART] = room[-APART:] = 0xCC
        exchanged = room[APART:-APART]
        attended = torch.zeros(LAYERS, self.most, self.heads * self.form.size, dtype=torch.uint8)
        counters = torch.zeros(32 * (2 + form.kv_heads), dtype=torch.int32)
        touched = torch.full((form.blocks,), -1, dtype=torch.int32)
        layers = torch.zeros(LAYERS, 23, dtype=torch.int64)  # `Layer` of chain.cuh
        cached = torch.stack([world.cache[0].view(torch.uint8) for world in self.worlds])
        keys = PAGE * form.size * form.dtype.itemsize // 128
        for words, world, its in zip(layers, self.worlds, cached, strict=True):
            words[19] = its.data_ptr()
            for at, name in enumerate(("k_scale", "v_scale", "out_scale"), 20):
                words[at] = world.scales[name].data_ptr() if name in world.scales else 0
        positions = env.step.position_ids
        arguments = (
            *(layers, LAYERS, given, attended, positions, env.step.cu_q, env.step.kv_len),
            *(env.step.block_tables, exchanged, counters, touched),
            launch_arguments.logit_scale(self.worlds[0].call([self.part])),
            env.step.block_tables.stride(0),
            *((TensorMap(cached.view(-1, 128), keys, 128), cached) if form.bound > BOUND else ()),
        )
        launch = Launch(self.spec(len(exchanged)), (form.blocks, 1, 1), arguments)
        emulated_warps.run([launch], seed, is_late=is_late, together=form.blocks)
        assert (room[:APART] == 0xCC).all() and (room[-APART:] == 0xCC).all()
        assert not touched.any(), "shared memory outside of the tiles' slots was written"
        ahead = exchanged.view(2, -1)[LAYERS % 2, values:]
        assert not ahead.any(), "a state was not cleared for the layer behind the last"
        assert (attended[:, self.tokens :] == 0xFF).all(), "of padding, zeros"
        return ~attended[:, : self.tokens]


@pytest.mark.parametrize(("form", "context", "tokens", "padding"), CASES, ids=str)
def test_attention_in_one_launch_has_the_bits_of_batch(form, context, tokens, padding):
    request = Request(form, context, tokens, padding)
    wanted = request.by_batch()
    given = torch.stack([request.take_given(world) for world in request.worlds])
    for seed, is_late in enumerate((False, True)):
        assert torch.equal(request.run(given, seed, is_late=is_late), wanted), is_late
