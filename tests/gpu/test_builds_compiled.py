"""Engines and kernels that take more cores to compile than CI has; it needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import packed_linear, prefill, small_kernels
from support.cuda_build import CASES, LIMITS, MODEL_OF_RANKS, write_case, write_model
from support.decoder_layers_compiled import (
    HELD_ON_A_GPU_MACHINE,
    ON_A_GPU_MACHINE,
    Shape,
    require_held,
    require_no_spills,
)

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine
from llmctl.builder.planted import LoadFormat
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.ops.sampling.kernel import kernels


@pytest.mark.parametrize("case", CASES)
def test_engines_hold_the_kernels_that_their_steps_launch(tmp_path: Path, case: str) -> None:
    checkpoint = write_case(tmp_path / "checkpoint", case)
    run_build(plan_build(checkpoint, BuildRequest(**LIMITS), backend="cuda"), tmp_path / "engine")
    plan, _ = open_engine(tmp_path / "engine")  # raises where one is absent
    assert plan.kernels


# What engines have besides: kernels of heads, of windows, of ranks. CI has stand-ins for these
# (support/stand_ins.py).
MODES: dict[str, dict[str, Any]] = {
    "medusa": {"num_medusa_heads": 3, "medusa_choices": "[[0],[1],[0,0],[0,0,0]]"},
    "redrafter": {"redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 2},
    "eagle": {"eagle_layers": "0,1,1", "max_draft_len": 14, "max_non_leaves_per_layer": 14},
    "lookahead_decoding": {"lookahead_config": "[3,4,2]"},
    "none": {"tp_size": 2, "max_draft_len": 0},
    "draft_tokens_external": {"tp_invariant": True, "max_draft_len": 63, "max_num_tokens": 128},
}


@pytest.mark.parametrize("quantization", ["none", "static"])
@pytest.mark.parametrize("mode", MODES)
def test_engines_hold_the_kernels_that_heads_and_ranks_launch(
    tmp_path: Path, mode: str, quantization: str
) -> None:
    checkpoint = write_model(tmp_path / "checkpoint", "llama", MODEL_OF_RANKS, quantization)
    limits = {"max_batch_size": 4, "max_num_tokens": 48, "max_seq_len": 96, **MODES[mode]}
    request = BuildRequest(**limits, speculative_decoding_mode=mode)
    planned = plan_build(checkpoint, request, backend="cuda", load_format=LoadFormat("dummy"))
    run_build(planned, tmp_path / "engine")
    plan, _ = open_engine(tmp_path / "engine")
    assert plan.kernels


@pytest.mark.parametrize("shape", ON_A_GPU_MACHINE, ids=lambda shape: "-".join(map(str, shape)))
def test_the_launch_of_decoder_layers_spills_nothing(shape: Shape) -> None:
    require_no_spills(*shape)


@pytest.mark.parametrize(("kv_algo", "held", "tokens"), HELD_ON_A_GPU_MACHINE)
def test_units_are_held_in_registers(kv_algo: str | None, held: int, tokens: int) -> None:
    require_held(kv_algo, held, tokens)


@pytest.mark.parametrize("vocab", [32000, 151936, 152064])
def test_sampling_kernels_compile_without_spills(vocab: int) -> None:
    for spec in kernels(vocab):
        assert compile_kernel(spec).local_bytes == 0, spec.name


@pytest.mark.parametrize("op", small_kernels.OPS)
def test_row_wise_kernels_compile_without_spills(op: str) -> None:
    small_kernels.require_no_spills(small_kernels.specs_of(op))


OPS_OF_WEIGHTS = ("packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv")


@pytest.mark.parametrize("dtype", [packed_linear.FP8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS_OF_WEIGHTS)
def test_products_of_few_tokens_run_together(op: str, dtype: torch.dtype) -> None:
    count = None if op == "packed_linear" else 3
    packed_linear.require_products_of_warpgroups(op, dtype, packed_linear.VARIANTS[:count])


@pytest.mark.parametrize("op", OPS_OF_WEIGHTS)
def test_products_of_few_tokens_with_four_bits_run_together(op: str) -> None:
    texts = packed_linear.VARIANTS_OF_FOUR_BITS[: None if op == "packed_linear" else 3]
    packed_linear.require_products_from_registers(op, texts)


@pytest.mark.parametrize("name", prefill.CALLS)
def test_products_of_many_tokens_run_together(name: str) -> None:
    variants = prefill.variants_of(prefill.CALLS[name])
    for variant, found in prefill.compile_variants(name, variants).items():
        prefill.require_sums_in_registers(variant, *found)
