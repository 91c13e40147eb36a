"""Times the packed products of few tokens on a GPU, and finds their tactics.

    python -m scripts.bench.gemm [--models 70b,8b,3b,1b] [--tokens 1,11] [--dtype mxfp4]
        [--trees] [--sweep | --fills]

What counts is a product's time within a step: kernels overlap, and a ring that is too large keeps
the next kernel away. So chains of whole layers are timed in a graph: norms, attention over 1,000
tokens (with --trees that of a tree, which some numbers of tokens have only there) and the four
products. --sweep tries the variants of one product after another in the chain,
each from the best found so far, and prints entries for packed_linear's tactics.json; beyond the
largest token tile those are two tiles, beside the kernel for many tokens. --fills
tries alone how much of a ring is on its way while it is filled for the first time, which --sweep
does last. Bits are compared elsewhere (tests/gpu/test_packed_linear_exact.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, replace
from statistics import median

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, Launch, LaunchEnv, StepShape
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear import kernel as product
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.decode import (
    NORM_PART,
    SHARED_HALF,
    TOKEN_TILES,
    DecodeVariant,
)
from llmctl.plugins.ops.packed_linear.tactics import (
    MANY,
    RING_ROOM,
    normalizes,
    parse_tactic,
    tactic_of,
)
from llmctl.plugins.ops.paged_attention import kernel as attention
from llmctl.plugins.schemes.table import quantized_schemes
from scripts.bench.gemm_support import FP8, LIMITS, MAX_TOKENS, MODELS, Bench, Model, layer

CONTEXT = 1000  # tokens
ORDER = (2, 0, 3, 1)  # of the sweep: gate and up, QKV, down, output
NORMED = (0, 2)  # products that read a normalized row
ROOMS = (72 << 10, 90 << 10, SHARED_HALF - 2048, 134 << 10, 160 << 10, RING_ROOM)
MAX_FILL = 4  # slots
GAIN_US = 0.05  # a layer; less is noise
ATTENTION = 1  # comes before this product


@dataclass
class Layer:
    """The calls of one layer."""

    products: list[OpCall]
    attention: OpCall


class Chain:
    """Layers of one model, together larger than L2, and steps over them."""

    def __init__(
        self, bench: Bench, model: Model, tokens: int, dtype: str, *, is_tree: bool = False
    ) -> None:
        self.bench, self.model, self.tokens, self.dtype = bench, model, tokens, dtype
        self.tree_len = tokens if is_tree else 0
        random = {"generator": bench.generator, "device": "cuda"}
        rows = [torch.randn(MAX_TOKENS, model.hidden, **random).bfloat16() for _ in range(3)]
        self.layers = [self._layer(index, rows) for index in range(model.copies)]
        shape = (model.copies, 40, 2, model.kv_heads, 32, model.head_size)
        bench.env = replace(bench.env, kv_cache=torch.randn(shape, **random).to(FP8), limits=LIMITS)
        self.env = replace(bench.env, step=self._step(bench.env))
        torch.cuda.synchronize()

    def _layer(self, index: int, rows: list[torch.Tensor]) -> Layer:
        m, products = self.model, layer(self.bench, self.model, self.dtype)
        query = products[0].outputs["q"]
        for i, product_index in enumerate(NORMED):
            products[product_index] = self._with_norm(products[product_index], rows, i)
        one = torch.full((1,), 0.02, device="cuda")
        inputs = {"q": query, "k_scale": one, "v_scale": one, "out_scale": one}
        attributes = {
            "layer": index,
            "num_heads": m.heads,
            "num_kv_heads": m.kv_heads,
            "head_size": m.head_size,
            "softmax_scale": m.head_size**-0.5,
            "window": 0,
        }
        outputs = {"out": products[ATTENTION].inputs["x"]}
        return Layer(products, OpCall("paged_attention", "", inputs, outputs, attributes))

    def _with_norm(self, call: OpCall, rows: list[torch.Tensor], turn: int) -> OpCall:
        """The call with a norm before it; residuals change places from norm to norm."""
        x, residual, residual_out = rows if turn == 0 else (rows[0], rows[2], rows[1])
        weight = torch.ones(self.model.hidden, dtype=torch.bfloat16, device="cuda")
        inputs = {**call.inputs, "x": x, "residual": residual, "norm_weight": weight}
        outputs = {**call.outputs, "normal": call.inputs["x"], "residual_out": residual_out}
        attributes = {**call.attributes, "epsilon": 1e-5}
        return OpCall(call.op, call.name, inputs, outputs, attributes)

    def _step(self, env: LaunchEnv) -> DeviceStep:
        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        tables = ints([i % 40 for i in range(128)]).repeat(16, 1)
        lengths = ints([CONTEXT] + [0] * 15)
        starts = ints([0] + [self.tokens] * 16)
        positions = env.step.position_ids + CONTEXT - self.tokens
        step = replace(
            env.step, position_ids=positions, cu_q=starts, kv_len=lengths, block_tables=tables
        )
        if not self.tree_len:
            return step
        chain = torch.arange(LIMITS.max_draft_len + 1, dtype=torch.int32, device="cuda")
        return replace(
            step,
            tree_start=ints([0] + [-1] * 15),
            tree_root=ints([CONTEXT - self.tokens] + [0] * 15),
            paths=chain.repeat(MAX_TOKENS, 1),
        )

    def launches(self, plan: list[str], layers: list[Layer]) -> list[Launch]:
        """A step; an empty variant is the tactic's."""
        shape = StepShape(self.tokens, 1, self.tokens, self.tokens, CONTEXT, self.tree_len)
        found = []
        for one in layers:
            for index, (call, variant) in enumerate(zip(one.products, plan, strict=True)):
                if index == ATTENTION:
                    found += attention.launches(one.attention, self.env, shape)
                tactic = f"{self.tokens}:{variant};*:{MANY}" if variant else ""
                chosen = replace(call, tactic=tactic)
                found += product.launches(chosen, self.bench.env, shape)
        return found

    def time(self, plan: list[str]) -> float:
        """Microseconds a layer."""
        return self.bench.time(self.launches(plan, self.layers), 5) / len(self.layers)

    def weight(self, index: int) -> torch.Tensor:
        """The weight of a product."""
        return self.layers[0].products[index].inputs["weight"]

    def stored(self, index: int) -> str:
        """The variant that the product's tactic has for the step's tokens."""
        call = self.layers[0].products[index]
        return next(v for most, v in parse_tactic(tactic_of(call)) if self.tokens <= most)

    def variants(self, index: int) -> list[str]:
        """What a sweep tries."""
        tiles, chunks = self.weight(index).shape[:2]
        form = form_of(self.layers[0].products[index])
        width = next((most for most in TOKEN_TILES if self.tokens <= most), TOKEN_TILES[-1])
        norms = [0]
        if index in NORMED and self.tokens == 1:
            parts = self.model.hidden // NORM_PART
            norms += [warps for warps in (8, 12, 16) if parts % warps == 0]
        found = []
        slots = ((1, 4), (1, 2), (1, 1), (2, 4), (2, 2), (2, 1))
        for (rows, wide), split, room, warps in itertools.product(
            slots, (0, 1, 2, 4), ROOMS, norms
        ):
            if tiles * split > 300 * rows or (split == 0 and self.tokens > width):
                continue
            made = DecodeVariant(width, rows, wide, 0, split, norm_warps=warps, form=form)
            made = made.with_stages(chunks, room)
            if split > 1:  # no more slots than a block's share of K
                intervals = -(-chunks // form.interval)
                needed = -(-intervals // split) * form.interval // wide
                made = replace(made, stages=min(made.stages, max(needed, 3)))
            if not 2 <= made.stages <= 24 or not made.fits(tiles, chunks, True):
                continue
            found.append(made)
            if split == 1 and self.tokens > width:
                found.append(replace(made, pairs=True))
            if split == 0:
                found.append(replace(made, blocks=128))
            elif split == 1 and tiles > 132 * rows:  # as few blocks as leave none with more to do
                each = -(-tiles // rows // 132)
                found.append(replace(made, blocks=-(-tiles // rows // each)))
        of_many = [MANY] * (self.tokens > width)
        return [*dict.fromkeys(map(str, found)), *of_many]


def sweep(chain: Chain, name: str) -> None:
    """Improve one product after another; print what was best."""
    tried = {index: chain.variants(index) for index in ORDER}
    plans = [[v if i == index else "" for i in range(4)] for index in ORDER for v in tried[index]]
    first = chain.layers[:1]
    chain.bench.compile([launch for plan in plans for launch in chain.launches(plan, first)])
    best = [""] * 4
    for index in ORDER:
        ways = [[*best[:index], v, *best[index + 1 :]] for v in tried[index]]
        times = sorted((chain.time(way), way[index]) for way in ways)
        for kind in (False, True):
            some = [f"{v} {us:.2f}" for us, v in times if normalizes(v) == kind][:4]
            if some:
                print(f"  product {index}: " + "  ".join(some), flush=True)
        way = [*best[:index], times[0][1], *best[index + 1 :]]
        if chain.time(way) < chain.time(best) - GAIN_US:
            best = way
    sweep_fills(chain, name, best)


def sweep_fills(chain: Chain, name: str, best: list[str]) -> None:
    """Improve a plan by what rings ask for at once in their first turn; print the best plan."""
    plan = [variant or chain.stored(index) for index, variant in enumerate(best)]
    for index in ORDER:
        if plan[index] == MANY:
            continue
        variant = DecodeVariant.parse(plan[index], form_of(chain.layers[0].products[index]))
        if variant.normalizes or variant.pairs:
            continue
        most = min(variant.stages, MAX_FILL) + 1
        ways = [
            [*plan[:index], str(replace(variant, fill=fill)), *plan[index + 1 :]]
            for fill in range(most)
        ]
        chain.bench.compile(
            [each for way in ways for each in chain.launches(way, chain.layers[:1])]
        )
        times = [(chain.time(way), way) for way in ways]
        print(
            f"  product {index}: " + "  ".join(f"{w[index]} {us:.2f}" for us, w in times),
            flush=True,
        )
        plan = min(times)[1]
    best = plan
    print(f"{name} M={chain.tokens}: {chain.time([''] * 4):.2f} -> {chain.time(best):.2f} us")
    for index, variant in enumerate(best):
        tiles, chunks = chain.weight(index).shape[:2]
        form = form_of(chain.layers[0].products[index]).name
        key = f"{chain.layers[0].products[index].op} {tiles}x{chunks} {form}"
        if variant:
            tiles_of_tokens = -(-chain.tokens // TOKEN_TILES[-1])
            ends = (*TOKEN_TILES, tiles_of_tokens * TOKEN_TILES[-1])
            most = next(most for most in ends if chain.tokens <= most)
            print(json.dumps({key: {str(most): variant}}))


def main() -> None:
    """Parse options and time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="70b,8b,3b,1b")
    parser.add_argument("--tokens", default="1,11", help="tokens of a step")
    schemes = [scheme.name for scheme in quantized_schemes()]
    parser.add_argument("--dtype", choices=schemes, default="fp8", help="of weights")
    parser.add_argument("--trees", action="store_true", help="attention of a tree of the tokens")
    parser.add_argument("--sweep", action="store_true", help="look for better tactics")
    parser.add_argument("--fills", action="store_true", help="look for better first turns alone")
    options = parser.parse_args()
    rate = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}: plain read {rate:.3f} TB/s", flush=True)
    for name, tokens in itertools.product(
        options.models.split(","), map(int, options.tokens.split(","))
    ):
        chain = Chain(Bench(), MODELS[name], tokens, options.dtype, is_tree=options.trees)
        chain.bench.compile(chain.launches([""] * 4, chain.layers[:1]))
        us = chain.time([""] * 4)
        size = sum(chain.weight(index).nbytes for index in range(4))
        floor = size / rate / 1e6
        print(f"{name} layer, {tokens} tokens: {us:8.2f} us, weights alone {floor:.2f}", flush=True)
        if options.sweep:
            sweep(chain, name)
        elif options.fills:
            sweep_fills(chain, name, [""] * 4)
        del chain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
