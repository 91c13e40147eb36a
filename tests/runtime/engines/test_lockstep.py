"""One plan of all ranks of an engine for a GPU: what it consists of, and the planted text by the
operators' references."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import planted
from support.cuda_program import STREAM, Recorder
from support.lockstep import InLockstep
from support.planted import ACCEPTANCE, SEED

from llmctl.builder.engine_kernels import kernel_specs
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.step_limits import step_limits
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.kernel_spec import StepShape, TensorMap
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.engine import bind_plan, kv_bytes_per_block, kv_cache_shape, make_calls
from llmctl.runtime.engines.lockstep import (
    lockstep_parts,
    lockstep_plan,
    name_on,
    rank_stride,
)
from llmctl.runtime.engines.planted_text import next_tokens
from llmctl.runtime.engines.planted_weights import generate_weights
from llmctl.runtime.engines.rotary_tables import fill_rotary_tables
from llmctl.runtime.engines.weight_places import allocated_bytes
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

COUNTS = (2, 4, 8)
ROWS = 40
Weights = dict[str, torch.Tensor]


def write_config(folder: Path, quantization: str | None) -> None:
    """That of a tiny planted target with heads for eight ranks."""
    recipe = Recipe("tiny", "target", ACCEPTANCE, SEED, quantization)
    write_checkpoint(folder, recipe, config_only=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))


def generated(engine: EnginePlan, rank: int) -> Weights:
    weights = {}
    for tensor in (t for t in engine.plan.tensors if t.kind == "weight"):
        found = torch.zeros(tuple(map(int, tensor.shape)), dtype=getattr(torch, tensor.dtype))
        weights[tensor.name] = found
    fill_rotary_tables(engine.plan, weights)
    generate_weights(engine.config, engine.plan, weights, rank)
    return weights


def all_ranks(engine: EnginePlan, ranks: int) -> Weights:
    return {
        name_on(rank, name): tensor
        for rank in range(ranks)
        for name, tensor in generated(engine, rank).items()
    }


@pytest.mark.parametrize("quantization", ["fp8", None])
@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_in_lockstep_say_the_planted_text(
    tmp_path: Path, ranks: int, quantization: str | None
) -> None:
    write_config(tmp_path / "target", quantization)
    limits = {"max_batch_size": 1, "max_draft_len": ROWS - 1}
    engine = planted.plan(tmp_path / "target", quantization, tp_size=ranks, **limits)
    plan = lockstep_plan([engine.plan] * ranks)
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    weights = all_ranks(engine, ranks)
    tensors = bind_plan(plan, weights, arena)
    cache = torch.zeros(kv_cache_shape(plan, 2), dtype=getattr(torch, plan.kv_cache.dtype))
    recipe = engine.config.weights
    tokens = np.random.default_rng(0).integers(*recipe["ordinary_tokens"], ROWS).astype(np.int32)
    count = np.arange(ROWS, dtype=np.int32)
    step = StepInputs(
        token_ids=tokens,
        position_ids=count,
        cu_q=np.array([0, ROWS], np.int32),
        kv_len=np.array([ROWS], np.int32),
        block_tables=np.array([[0, 1]], np.int32),
        slot_mapping=count,
        logit_rows=count,
    )
    calls = make_calls(plan, tensors)
    InLockstep(calls, lockstep_parts(rank_stride(engine.plan)), ReferenceProgram).run(step, cache)
    chosen = tensors[plan.logits][:ROWS].argmax(-1).numpy()
    assert np.array_equal(chosen, next_tokens(recipe)[tokens])
    layers = engine.plan.kv_cache.num_layers
    own = cache.view(ranks, layers, *cache.shape[1:]).float()
    assert all(bool(each.any()) for each in own.flatten(0, 1)), "every rank writes its layers"
    assert not torch.equal(own[0], own[1]), "ranks have weights of their own"
    embedding = [weights[name_on(rank, "model.embed_tokens.weight")] for rank in range(ranks)]
    assert all(torch.equal(each, embedding[0]) for each in embedding), "but one embedding"


def test_every_operator_of_a_rank_is_followed_by_that_of_the_next(tmp_path: Path) -> None:
    plan = planted.plan(tmp_path / "target", "fp8", tp_size=4).plan
    both = lockstep_plan([plan] * 4)
    names = [op.name for op in both.ops]
    gather = plan.ops[-1].name
    wanted = [name_on(r, op.name) for op in plan.ops for r in range(1 if op.name == gather else 4)]
    assert names == wanted
    assert both.logits == name_on(0, plan.logits)
    assert kv_bytes_per_block(both) == 4 * kv_bytes_per_block(plan)
    assert allocated_bytes(both) == 4 * allocated_bytes(plan)
    assert 4 * plan.arena_bytes <= both.arena_bytes <= 4 * plan.arena_bytes + 4 * 256
    assert both.scratch_bytes == plan.scratch_bytes, "kernels follow one another"
    layers = {op.attributes["layer"] for op in both.ops if op.op == "paged_attention"}
    assert layers == set(range(4 * plan.kv_cache.num_layers))
    ends = {}
    for rank in range(4):
        own = [
            t.offset
            for t in both.tensors
            if t.name.startswith(f"rank{rank}/") and t.offset is not None
        ]
        ends[rank] = min(own), max(own)
    assert all(ends[rank][1] < ends[rank + 1][0] for rank in range(3)), "ranks share no activation"


def test_ranks_with_different_plans_are_refused(tmp_path: Path) -> None:
    plan = planted.plan(tmp_path / "target", "fp8", tp_size=2).plan
    with pytest.raises(CorruptEngine, match="2 ranks and a plan for each rank"):
        lockstep_plan([plan, replace(plan, arena_bytes=plan.arena_bytes + 128)])


def test_launches_of_a_rank_take_its_own_tensors_and_sums_those_of_all(tmp_path: Path) -> None:
    """Packed once and rebound for layers: outputs, weights and layers of the cache are each rank's,
    and what a sum reads was written by all of them just before."""
    engine = planted.plan(tmp_path / "target", "fp8", tp_size=4)
    plan = lockstep_plan([engine.plan] * 4)
    tensors = bind_plan(
        plan, all_ranks(engine, 4), torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    )
    calls, limits = make_calls(plan, tensors), step_limits(plan, engine.config.build_config)
    binaries = [
        CompiledKernel(spec.name, "f", b"", 128, 0, spec.arguments, 1, 0, 16, 0)
        for spec in kernel_specs(plan, limits)
    ]
    recorder = Recorder()
    parts = lockstep_parts(rank_stride(engine.plan))
    program = CudaProgram(calls, binaries, limits, "cpu", recorder, parts=parts)
    cache = torch.zeros(kv_cache_shape(plan, 3), dtype=getattr(torch, plan.kv_cache.dtype))
    program.bind_kv_cache(cache)
    program.enqueue(StepShape(3, 1, 3, 3, 3), STREAM)
    launched = [(name, arguments) for name, _, arguments, *_ in recorder.launched]
    assert recorder.num_rebound > 0
    for call in calls:
        own = [*call.outputs.values()]
        own += [tensor for role, tensor in call.inputs.items() if role.endswith("weight")]
        own += [cache[call.attributes["layer"]]] if "layer" in call.attributes else []
        if call.op == "all_reduce":
            own += parts(call.inputs["x"], 4)
        found: set[int] = set()
        while not {tensor.data_ptr() for tensor in own} <= found:  # a call may be two launches
            _, arguments = launched.pop(0)
            found |= {_address(argument) for argument in arguments}
    assert not launched


def _address(argument: object) -> int:
    if isinstance(argument, TensorMap):
        argument = argument.tensor
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else 0
