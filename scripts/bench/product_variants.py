"""Tries the variants of one packed product within a step that something else times."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.arguments import form_of, is_fp8
from llmctl.plugins.ops.packed_linear.decode import (
    SHARED_HALF,
    TOKEN_TILES,
    DecodeVariant,
    decode_spec,
)
from llmctl.plugins.ops.packed_linear.tactics import tactic_of

ROOMS = (110 << 10, 134 << 10, 160 << 10, 206 << 10, 222 << 10)  # of a ring
FILLS = (0, 1, 2)
BEST = 4  # that are timed again
GAIN_US = 0.5  # of a step; less is noise

Timing = Callable[[], tuple[float, torch.Tensor]]  # least ms of a step, and its logits


def tile_of(rows: int) -> int:
    """Tokens of the tile that so many rows have."""
    return next(most for most in TOKEN_TILES if rows <= most)


def set_tactic(call: OpCall, tactic: str) -> None:
    """Of a call that is frozen for everybody else."""
    object.__setattr__(call, "tactic", tactic)


def variants_of(call: OpCall, rows: int, num_sms: int) -> list[DecodeVariant]:
    """Those that can run a call: K is split only where there are few row tiles."""
    tiles, chunks = call.inputs["weight"].shape[:2]
    form, has_fp8 = form_of(call), is_fp8(call)
    splits = (0, 1, 2, 4) if tiles <= 2 * num_sms else (0, 1)
    found = []
    for row_tiles, wide, room, split, fill in itertools.product(
        (1, 2), (1, 2, 4), ROOMS, splits, FILLS
    ):
        made = DecodeVariant(tile_of(rows), row_tiles, wide, 0, split, fill=fill, form=form)
        made = made.with_stages(chunks, room)
        if not 3 <= made.stages <= 24 or not made.fits(tiles, chunks, has_fp8):
            continue
        found.append(made)
        if split == 1 and row_tiles == 1:
            found.append(replace(made, blocks=num_sms))
        if split < 2 and row_tiles == 1 and made.shared_bytes(chunks) <= SHARED_HALF:
            found.append(replace(made, blocks=min(2 * num_sms, tiles)))
    return list(dict.fromkeys(found))


def compile_variants(call: OpCall, variants: list[DecodeVariant], limits: StepLimits) -> None:
    """All binaries, on all cores."""
    specs = {spec.name: spec for spec in (decode_spec(call, each, limits) for each in variants)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(compile_kernel, specs.values()))


def sweep(calls: list[OpCall], rows: int, limits: StepLimits, timing: Timing) -> bool:
    """Try all variants on calls of one shape at once, print the best ones, and an entry of
    packed_linear's tactics.json where one is faster; the calls keep it. Whether all gave the same
    logits."""
    call = calls[0]
    variants = variants_of(call, rows, limits.num_sms)
    compile_variants(call, variants, limits)
    stored = tactic_of(call)

    def use(variant: str) -> None:
        for each in calls:
            set_tactic(each, f"{rows}:{variant};{stored}" if variant else stored)

    def run(variant: str) -> tuple[float, torch.Tensor]:
        use(variant)
        return timing()

    _, wanted = run("")
    times, is_same = [], True
    for variant in map(str, variants):
        ms, logits = run(variant)
        times.append((ms, variant))
        if not torch.equal(wanted, logits):
            print(f"    {variant}: LOGITS DIFFER", flush=True)
            is_same = False
    again = sorted((max(ms, run(variant)[0]), variant) for ms, variant in sorted(times)[:BEST])
    print("    " + "  ".join(f"{variant} {ms:.4f}" for ms, variant in again), flush=True)
    before = min(run("")[0] for _ in range(2))
    if again[0][0] < before - GAIN_US / 1e3:
        use(again[0][1])
        tiles, chunks = call.inputs["weight"].shape[:2]
        key = f"{call.op} {tiles}x{chunks} {form_of(call).name}"
        entry = json.dumps({key: {str(tile_of(rows)): again[0][1]}})
        print(f"    {before:.4f} -> {again[0][0]:.4f} {entry}", flush=True)
    return is_same
