"""MXFP4 weights as they are packed for a GPU, and the memory that their kernels need."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.mxfp4 import (
    CUDA_LIMITS,
    LAYER,
    SHAPE,
    VOCAB,
    modelopt_weight,
    parts_of,
    plan_cuda,
    values_of,
)

from llmctl.builder.build import run_build
from llmctl.builder.engine_kernels import (
    meta_cache,
    meta_calls,
    meta_step,
    plan_launches,
    planned_shapes,
    scratch_bytes,
)
from llmctl.builder.packing import RowOrder
from llmctl.builder.planted import LoadFormat
from llmctl.builder.schemes.mxfp4 import MxRows, PackedMxRows
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepShape
from llmctl.plugins.core.operators import operator_module
from llmctl.plugins.ops.packed_linear import layout
from llmctl.plugins.schemes.mxfp4.packing import unpack
from llmctl.runtime.engines.open_tensorrt import kernels_a_step

# ---- packed for a GPU ----


def row_order(op: str, rows: int) -> torch.Tensor:
    """Packed row i holds logical row [i] (plugins/ops/packed_linear/layout.py)."""
    heads = [SHAPE[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    if op == "packed_linear_rope_kv":
        return layout.rope_order(*heads)
    if op == "packed_linear_swiglu":
        return layout.pair_order(rows // 2)
    return layout.plain_order(rows)


def test_packed_weights_are_four_bits_and_modelopts_numbers(mxfp4_checkpoints) -> None:
    stored = load_file(mxfp4_checkpoints("head") / "model.safetensors")
    engine = plan_cuda(mxfp4_checkpoints("head"))
    tensors = {tensor.name: tensor for tensor in engine.plan.tensors}
    checked = []
    for op in engine.plan.ops:
        if not op.op.startswith("packed_linear"):
            continue
        wanted = torch.cat([modelopt_weight(stored, module) for module in parts_of(op.name)])
        rows, inner = wanted.shape
        name = op.inputs["weight"]
        shape = (-(-rows // 64), -(-inner // 256), 64, 136)
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == ("uint8", shape)
        assert op.attributes["scheme"] == "mxfp4"
        weight = values_of(engine, name)
        assert weight.dtype == torch.uint8 and weight.shape == shape
        order = row_order(op.op, rows)
        packed = unpack(weight, len(order), inner).float()
        packed *= values_of(engine, op.inputs["weight_scale"])[:, None]
        assert torch.equal(layout.restore(packed, order), wanted), op.name
        assert not packed[order < 0].any()
        checked.append((op.op, inner))
    assert checked == [
        *[
            ("packed_linear_rope_kv", 96),
            ("packed_linear", 192),
            ("packed_linear_swiglu", 96),
            ("packed_linear", 288),
        ]
        * 2,
        ("packed_linear", 96),
    ]


@pytest.mark.parametrize("case", ["plain", "head, fp8 cache"])
def test_the_packed_plan_gives_the_logits_of_the_cpu_s_to_the_bit(
    case: str, mxfp4_checkpoints, build_engine, open_test_engine, some_tokens, tmp_path, monkeypatch
) -> None:
    """Both by the operators' references, which unpack weights."""
    tokens = some_tokens(37, VOCAB)
    run_build(plan_cuda(mxfp4_checkpoints(case)), tmp_path / "cuda")
    # Planned without binaries, which the references do not need.
    monkeypatch.setattr("llmctl.builder.validation.kernels.check_kernels", lambda *_: None)
    found = open_test_engine(tmp_path / "cuda", "reference").run(tokens)
    plain = build_engine(mxfp4_checkpoints(case), dtype="bfloat16", **CUDA_LIMITS)
    assert torch.equal(found, open_test_engine(plain, "reference").run(tokens))


def test_a_weight_larger_than_a_chunk_is_made_piece_by_piece(
    mxfp4_checkpoints, monkeypatch
) -> None:
    engine = plan_cuda(mxfp4_checkpoints("plain"))
    parts = tuple((f"{LAYER}.mlp.{part}_proj.weight", (288, 96)) for part in ("gate", "up"))
    packed = PackedMxRows(MxRows(parts), RowOrder("pair", (288,)))
    whole = [values_of(engine, f"{LAYER}.mlp.gate_up_proj.weight")]
    whole.append(torch.cat(list(MxRows(parts).chunks(engine.checkpoint))).view(torch.uint8))
    assert whole[1].shape == (576, 96)
    for chunk_bytes, counts in ((1 << 20, (1, 2)), (64 * 96 * 4, (3, 4)), (1, (9, 576))):
        monkeypatch.setattr("llmctl.builder.schemes.mxfp4.CHUNK_BYTES", chunk_bytes)
        for source, wanted, count in zip((packed, MxRows(parts)), whole, counts, strict=True):
            pieces = list(source.chunks(engine.checkpoint))
            assert len(pieces) == count
            assert torch.equal(torch.cat([p.view(torch.uint8) for p in pieces]), wanted)


def test_the_memory_plan_counts_the_launches_that_expand_weights(mxfp4_checkpoints) -> None:
    limits = {"max_batch_size": 32, "max_draft_len": 7, "max_num_tokens": 256, "max_seq_len": 96}
    engine = plan_cuda(mxfp4_checkpoints("head"), **limits)
    assert engine.plan.ops[-1].name == "lm_head"
    sizes = step_limits(engine.plan, engine.config.build_config)
    step, cache = meta_step(sizes), meta_cache(engine.plan, sizes)

    def memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for tokens in (1, 32, 64, 65, 256):
        shape = StepShape(tokens, tokens if tokens < 32 else 32, tokens, 8, 96)
        count = 0
        for call, extent in meta_calls(engine.plan):
            env = LaunchEnv(step, cache, sizes, extent, memory)
            module = operator_module(call.op, "kernel")
            count += len(module.launches(call, env, shape))
        assert len(engine.plan.ops) <= count <= kernels_a_step(engine.plan, tokens), tokens
    # Two layers of four products and the head are expanded for more tokens than 64.
    assert kernels_a_step(engine.plan) == kernels_a_step(engine.plan, 64) + 9


def test_prompts_need_scratch_memory_of_one_fp8_copy_of_each_size(mxfp4_checkpoints) -> None:
    scratch = []
    for tokens in (64, 96):
        engine = plan_cuda(mxfp4_checkpoints("plain"), max_num_tokens=tokens, max_draft_len=0)
        named: dict[str, int] = {}

        def memory(name: str, shape: Any, dtype: torch.dtype, named: Any = named) -> torch.Tensor:
            named[name] = math.prod(shape) * dtype.itemsize
            return torch.empty(shape, dtype=dtype, device="meta")

        sizes = step_limits(engine.plan, engine.config.build_config)
        for shape in planned_shapes(sizes):
            plan_launches(engine.plan, sizes, shape, memory)
        assert sum(named.values()) == scratch_bytes(engine.plan, sizes)
        scratch.append(sorted(size for name, size in named.items() if "expanded" in name))
    # [rows, K] in tiles of 64 rows by 256 of K: q, k and v; o; gate and up; down
    wanted = [320 * 256, 128 * 256, 576 * 256, 128 * 512]
    assert scratch == [[], sorted(wanted)]


def test_a_generated_engine_has_the_tensors_of_a_stored_one(mxfp4_checkpoints, tmp_path) -> None:
    source = mxfp4_checkpoints("head, fp8 cache")
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copyfile(source / name, tmp_path / name)
    stored = plan_cuda(source).plan
    made = plan_cuda(tmp_path, load_format=LoadFormat("dummy")).plan
    assert made.ops == stored.ops
    assert [(t.name, t.dtype, t.shape) for t in made.tensors] == [
        (t.name, t.dtype, t.shape) for t in stored.tensors
    ]
