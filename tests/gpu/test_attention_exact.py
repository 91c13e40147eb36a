"""generation.cu and verification.cu give the bits of the context kernel, whatever the step and the
context."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.attention import FP8, INT8, Part, World, run_one, same_bits
from support.gpu import execute

from llmctl.plugins.backends.cuda import compiler
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch, LaunchEnv
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention import launch_arguments
from llmctl.plugins.ops.paged_attention.generation import generation
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT
from llmctl.plugins.ops.paged_attention.verification import verification

WORLDS = [
    {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (1500, 333), "kv_dtype": FP8},
    {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (6000, 700), "kv_dtype": FP8},
    {"heads": 32, "kv_heads": 8, "size": 128, "lengths": (1500, 333)},
    {"heads": 32, "kv_heads": 8, "size": 64, "lengths": (2600, 500), "kv_dtype": FP8},
    {"heads": 4, "kv_heads": 2, "size": 128, "lengths": (1300, 500), "tokens_per_block": 8},
    {"heads": 7, "kv_heads": 1, "size": 64, "lengths": (1300, 500), "tokens_per_block": 128},
    {"heads": 24, "kv_heads": 8, "size": 128, "lengths": (2500, 333), "kv_dtype": INT8},
    {"heads": 16, "kv_heads": 1, "size": 64, "lengths": (4700, 500), "kv_dtype": FP8},
    {"heads": 8, "kv_heads": 8, "size": 128, "lengths": (1500, 333), "tokens_per_block": 8}
    | {"kv_dtype": FP8, "spread": 3.0},
]
Variant = generation.Variant | verification.Variant
KERNELS: tuple[Variant, ...] = (*generation.VARIANTS, *verification.VARIANTS)
POSITIONS = (0, 1, 5, 62, 63, 64, 65, 127, 128, 511, 512, 1023, 1024, 1087, 1151, 1152)


def steps(length: int, other: int) -> list[list[Part]]:
    """Short requests at the borders of tiles and units, and batches of them."""
    ways: list[list[Part]] = [[(0, p, 1)] for p in (*POSITIONS, length - 1)]
    for count in (2, 5, 8, 11, 16, 17):
        ways += [[(0, p, count)] for p in (0, 30, 60, 500, 1015, 1024, 1030, length - count)]
    ways += [[(0, length - 11, 11), (1, other - 5, 5)], [(1, other - 1, 1), (0, length // 2, 17)]]
    return ways


def launch_of(
    world: World, parts: list[Part], variant: Variant, env: LaunchEnv, call: OpCall
) -> Launch | None:
    """The kernel for a step; None if it has no room for it."""
    requests, most = env.step.kv_len.shape[0], max(count for _, _, count in parts)
    if isinstance(variant, verification.Variant):
        if not verification.fits(variant, call, env.limits):
            return None
        tensors, scale = launch_arguments.own_tensors(call, env), launch_arguments.logit_scale(call)
        return verification.verification_launch(
            call, env, variant, requests, most, tensors, scale, SHORT
        )
    if not generation.covers(call, env.limits):
        return None
    num_blocks = -(-most // (generation.ROWS // (world.heads // world.kv_heads)))
    cut = generation.Cut(variant, num_blocks, -(-most // num_blocks))
    groups = requests * world.kv_heads * num_blocks
    if not variant.is_clustered and groups * variant.splits > 2 * env.limits.num_sms:
        return None  # they could not all run at once
    return generation.generation_launch(
        call,
        env,
        cut,
        requests,
        launch_arguments.own_tensors(call, env),
        launch_arguments.partials(call, env),
        launch_arguments.logit_scale(call),
        SHORT,
    )


def few(world: World, parts: list[Part], variant: Variant) -> list[torch.Tensor] | None:
    """The rows of a step by one kernel, with padding where there is room for it."""
    for padding in (2, 0):
        call, env = world.call(parts, 3), world.env(world.step(parts), padding)
        launch = launch_of(world, parts, variant, env, call)
        if launch is None:
            continue
        return run_one(launch, call, env, parts, execute)
    return None


@pytest.mark.parametrize("quantize_out", [False, True])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_they_give_the_bits_of_the_context_kernel(world, quantize_out):
    quantize_out = quantize_out and world.get("kv_dtype") == FP8
    made = World(**{"spread": 2.0, **world}, quantize_out=quantize_out, device="cuda")
    wanted = [made.run([(r, 0, n)], execute)[0] for r, n in enumerate(made.lengths)]
    served = Counter[str]()
    for parts in steps(*made.lengths):
        for variant in KERNELS:
            found = few(made, parts, variant)
            for (request, start, count), rows in zip(parts, found or [], strict=found is not None):
                served[str(variant)] += 1
                assert same_bits(rows, wanted[request][start : start + count]), (parts, variant)
    assert sum(count > 60 for count in served.values()) >= 2, served  # kernels that served


@pytest.mark.parametrize("variant", KERNELS, ids=str)
def test_numbers_that_were_read_too_early_are_read_again(variant, repository, monkeypatch):
    """The kernel starts while its predecessor has yet to write the step."""
    world = World(**WORLDS[0], quantize_out=True, device="cuda")
    old = [(1, 300, 11)]
    whole = [world.run([(r, 0, n)], execute)[0] for r, n in enumerate(world.lengths)]
    monkeypatch.setattr(compiler, "PLUGINS", repository / "tests")
    spec = KernelSpec(
        "late_step", "support/cuda_samples/late_step.cu", ("*i32", "*i32", "i32"), entry="late_step"
    )
    late = cuda_driver().load(compile_kernel(spec))
    monkeypatch.undo()
    names = ("position_ids", "cu_q", "kv_len", "block_tables")
    stream = torch.cuda.current_stream().cuda_stream
    for new in ([(0, 900, 11)], [(0, 40, 3)], [(1, 301, 11)], [(0, 1480, 1)]):
        call, steps = world.call(new, 8), [world.env(world.step(p)).step for p in (old, new)]
        room = max(getattr(step, name).numel() for step in steps for name in names)
        room += -room % 4  # rows start at 16 bytes
        # one buffer, so that one kernel writes all of it
        packed = [torch.zeros(len(names), room, dtype=torch.int32, device="cuda") for _ in steps]
        for step, rows in zip(steps, packed, strict=True):
            for name, row in zip(names, rows, strict=True):
                row[: getattr(step, name).numel()] = getattr(step, name).flatten()
        live, written = packed[0].clone(), packed[1]
        views = dict(zip(names, live, strict=True))
        views["cu_q"], views["kv_len"] = views["cu_q"][:2], views["kv_len"][:1]
        views["block_tables"] = views["block_tables"][None]
        rest = {n: getattr(steps[1], n) for n in DeviceStep.__dataclass_fields__ if n not in names}
        env = replace(world.env(world.step(new)), step=DeviceStep(**views, **rest))
        launch = launch_of(world, new, variant, env, call)
        if launch is None:
            continue
        execute([launch])  # loads the binary
        call.outputs["out"].view(torch.uint8).fill_(0x55)
        live.copy_(packed[0])
        arguments = (written, live, live.numel())
        torch.cuda.synchronize()
        cuda_driver().prepare(late, (1, 1, 1), arguments, False)(stream)
        execute([launch])
        (request, start, count) = new[0]
        assert same_bits(call.outputs["out"][:count], whole[request][start : start + count]), new
