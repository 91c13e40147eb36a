"""Times the output projection of a step, and finds its tactic.

    python -m scripts.bench.head 70b 8b 3b 1b [--rows 1,11] [--head bf16|fp8|mxfp4] [--sweep]

Two layers of these shapes with random weights, every operator a launch of its own, and the head
over all rows: the least ms of such a step in a CUDA graph, beside what a plain read of its weights
takes. --sweep tries the head's variants, twice the best of them, and prints an entry for
packed_linear's tactics.json where one is faster by GAIN_US. Ends with 1 where logits differ,
which must not happen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import median

import torch

from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.ops.packed_linear.arguments import form_of, is_fp8
from llmctl.plugins.ops.packed_linear.decode import DecodeVariant, decode_spec
from llmctl.plugins.ops.packed_linear.tactics import tactic_of
from llmctl.plugins.schemes.table import quantized_schemes
from scripts.bench.layers_support import CONTEXT, Model
from scripts.bench.rows import weight_bytes
from scripts.models.planted_shapes import SHAPES

LAYERS, DRAFT_LEN = 2, 16
AT = 1000  # tokens of context
ROOMS = (110 << 10, 134 << 10, 160 << 10, 206 << 10, 222 << 10)  # of a ring
FILLS = (0, 1, 2)
BEST = 4  # that are timed again
GAIN_US = 0.5  # of a step; less is noise
QFORMATS = {"bf16": "fp8", **{s.name: s.qformat for s in quantized_schemes()}}  # of the layers


class Head:
    """The output projection of one model."""

    def __init__(self, name: str, head: str) -> None:
        request = BuildRequest(
            max_batch_size=1,
            max_seq_len=CONTEXT,
            max_draft_len=DRAFT_LEN,
            speculative_decoding_mode="draft_tokens_external",
        )
        shape = replace(SHAPES[name], layers=LAYERS)
        is_quantized = head != "bf16"
        self.model = Model(
            shape, request=request, qformat=QFORMATS[head], quantized_head=is_quantized
        )
        self.model.use(one_launch=False)
        self.call = next(call for call in self.model.calls if call.name == "lm_head")
        self.stored, self.tactic = self.call.tactic, tactic_of(self.call)

    def time(self, rows: int, variant: str = "") -> tuple[float, torch.Tensor]:
        """Least ms of a step, and its logits: with the head's tactic, or a variant."""
        if variant:  # the call is frozen for everybody else
            object.__setattr__(self.call, "tactic", f"{rows}:{variant};{self.tactic}")
        try:
            ms = min(self.model.milliseconds(AT, one_launch=False, tokens=rows, rows=rows))
        finally:
            object.__setattr__(self.call, "tactic", self.stored)
        return ms, self.model.logits[:rows].clone()

    def variants(self, rows: int) -> list[DecodeVariant]:
        """Those that can run it."""
        weight = self.call.inputs["weight"]
        tiles, chunks = weight.shape[:2]
        form, has_fp8 = form_of(self.call), is_fp8(self.call)
        tokens = 8 if rows <= 8 else 16
        found = []
        for row_tiles, wide, room, split, fill in itertools.product(
            (1, 2), (1, 2, 4), ROOMS, (0, 1), FILLS
        ):
            made = DecodeVariant(tokens, row_tiles, wide, 0, split, fill=fill, form=form)
            made = made.with_stages(chunks, room)
            if not 3 <= made.stages <= 24 or not made.fits(tiles, chunks, has_fp8):
                continue
            found.append(made)
            if split == 1 and row_tiles == 1:
                found.append(replace(made, blocks=self.model.program.limits.num_sms))
        return list(dict.fromkeys(found))

    def compile(self, variants: list[DecodeVariant]) -> None:
        """All binaries, on all cores."""
        limits = self.model.program.limits
        specs = [decode_spec(self.call, variant, limits) for variant in variants]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            list(pool.map(compile_kernel, {spec.name: spec for spec in specs}.values()))


def sweep(head: Head, rows: int) -> bool:
    """Try all variants; whether all gave the same logits."""
    variants = head.variants(rows)
    head.compile(variants)
    _, wanted = head.time(rows)
    times, is_same = [], True
    for variant in variants:
        ms, logits = head.time(rows, str(variant))
        times.append((ms, str(variant)))
        if not torch.equal(wanted, logits):
            print(f"    {variant}: LOGITS DIFFER", flush=True)
            is_same = False
    best = sorted(times)[:BEST]
    again = sorted((max(ms, head.time(rows, variant)[0]), variant) for ms, variant in best)
    print("    " + "  ".join(f"{variant} {ms:.4f}" for ms, variant in again), flush=True)
    before = min(head.time(rows)[0] for _ in range(2))
    if again[0][0] < before - GAIN_US / 1e3:
        weight = head.call.inputs["weight"]
        tiles, chunks = weight.shape[:2]
        key = f"{head.call.op} {tiles}x{chunks} {form_of(head.call).name}"
        tokens = "8" if rows <= 8 else "16"
        print(f"    {before:.4f} -> {again[0][0]:.4f}", json.dumps({key: {tokens: again[0][1]}}))
    return is_same


def main() -> None:
    """Time head after head."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--rows", default="1,11", help="that get logits, all tokens of a step")
    parser.add_argument("--head", choices=QFORMATS, default="bf16", help="type of its weights")
    parser.add_argument("--sweep", action="store_true", help="look for better tactics")
    options = parser.parse_args()
    bandwidth = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}: plain read {bandwidth:.3f} TB/s", flush=True)
    is_same = True
    for name in options.shapes:
        head = Head(name, options.head)
        floor = weight_bytes(head.model.plan) / bandwidth / 1e9
        for rows in map(int, options.rows.split(",")):
            ms, _ = head.time(rows)
            print(
                f"{name} {options.head} head, {rows} rows: {ms:.4f} ms, {floor / ms:.1%} of a read"
            )
            if options.sweep:
                is_same &= sweep(head, rows)
        del head
        torch.cuda.empty_cache()
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
