"""What the one launch of decoder layers must compile to, and for which shapes and caches that is
checked.

CI compiles each model, cache and kind of weight once, with two tokens where there is such a launch:
that takes more registers. The rest is compiled where there are more cores than two, on the machine
with the GPU (tests/gpu/test_builds_compiled.py).
"""

from __future__ import annotations

import re
from dataclasses import replace

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.fused.decoder_layers.kernel import chain_spec
from llmctl.plugins.fused.decoder_layers.tactics import EVERYWHERE, Pace, measured_tactics
from scripts.bench.plan_support import planned
from support.decoder_layers import chain_of
from support.kernel import disassemble

Shape = tuple[str, str | None, str, int]  # model, KV cache, weights, tokens
_MXFP4 = "w4a8_mxfp4_fp8"
HERE: list[Shape] = [
    ("3b", "FP8", _MXFP4, 2),
    ("8b", "INT8", "fp8", 2),
    ("8b", None, _MXFP4, 2),
    ("1b", "FP8", _MXFP4, 2),
    ("70b", None, "fp8", 1),
]
ON_A_GPU_MACHINE: list[Shape] = [
    ("3b", "FP8", "fp8", 2),
    ("1b", "INT8", "fp8", 2),
    *(("3b", "FP8", weights, 1) for weights in ("fp8", _MXFP4)),
    *(("8b", "INT8", "fp8", 1), ("8b", None, _MXFP4, 1)),
    *(("1b", "FP8", _MXFP4, 1), ("1b", "INT8", "fp8", 1)),
]
# KV cache, work items (`unit`) that a warp holds, tokens.
HELD_HERE = [("INT8", 1, 2), ("FP8", 2, 2)]
HELD_ON_A_GPU_MACHINE = [
    *(("FP8", 1, 2), (None, 1, 2)),
    *(("FP8", 1, 1), ("INT8", 1, 1), (None, 1, 1), ("FP8", 2, 1)),
]


def require_no_spills(model: str, kv_algo: str | None, qformat: str, tokens: int) -> None:
    """All binaries of the launch have room, and keep everything in registers."""
    found = chain_of(model, most_tokens=tokens, kv_algo=kv_algo, qformat=qformat)
    assert found is not None
    limits = planned(model, kv_algo=kv_algo, qformat=qformat)[1]
    for each in measured_tactics(found.layers[0], tokens, is_always=True):
        if not each.gains_within(limits.max_seq_len):
            continue
        tactic = replace(found.tactic, gains=each.gains)
        kernel = compile_kernel(chain_spec(replace(found, tactic=tactic), limits))
        assert kernel.shared_bytes <= 227 << 10 and kernel.registers <= 168
        assert kernel.local_bytes == 0


def require_held(kv_algo: str | None, held: int, tokens: int) -> None:
    """As the products take them: nothing spills, and nothing waits between a unit's products."""
    found = chain_of("1b", most_tokens=tokens, kv_algo=kv_algo)
    assert found is not None
    pace = replace(EVERYWHERE, pace=Pace(3, 3, 5, 8, held))
    kernel = compile_kernel(chain_spec(replace(found, tactic=pace), planned("1b", kv_algo)[1]))
    assert kernel.local_bytes == 0 and kernel.threads == 512 and kernel.registers == 128
    code = disassemble(kernel)
    from_registers = re.findall(r"QGMMA\.64x8x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code)
    assert len(from_registers) == 16 * held
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 5, "four products, and what is held"
    assert len(re.findall(r"LDSM\.16\.M88\.4", code)) >= 16 * held
