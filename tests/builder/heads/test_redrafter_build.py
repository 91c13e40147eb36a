"""Engines with a ReDrafter head: its graphs against torch, what is stored, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.attention import same_bits
from support.cuda import open_on_fake_device
from support.cuda_build import HEADS
from support.driver import RecordingDriver
from support.redrafter import RECURRENCES, TorchHead, save_as, save_head
from support.redrafter_engine import BEAMS, HIDDEN, VOCAB, build, tensors_of

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config, read_plan
from llmctl.builder.heads.redrafter.names import FIRST, NEXT
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.plugins.ops.beam_search import kernel as beam_search
from llmctl.runtime.engines.engine import (
    Engine,
    bind_plan,
    kv_cache_shape,
    make_calls,
    open_cpu_engine,
)
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.engines.open_tensorrt import load_binaries
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.step import pack_continued

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request, new_model):
    return new_model("llama", head_dim=64, tie_word_embeddings=request.param)


@pytest.fixture
def target(new_model, save) -> Path:
    return save(new_model("llama", **HEADS))


def prompt() -> StepInputs:
    """With a row of logits for each token."""
    positions = np.arange(len(TOKENS), dtype=np.int32)
    return StepInputs(
        token_ids=np.array(TOKENS, np.int32),
        position_ids=positions,
        cu_q=np.array([0, len(TOKENS)], np.int32),
        kv_len=np.array([len(TOKENS)], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        slot_mapping=positions,
        logit_rows=positions,
    )


def continued(tokens: list[int], rows: list[int]) -> StepInputs:
    return pack_continued(np.array(tokens, np.int32), np.array(rows, np.int32))


def on_the_cpu(folder: Path) -> Engine:
    return open_cpu_engine(folder)


def on_a_fake_device(folder: Path) -> Engine:
    return open_on_fake_device(folder, DeviceQueue("cpu"))[0]


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float = 3e-5) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("opened", [on_the_cpu, on_a_fake_device])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize(("exit_dim", "num_layers"), [(2 * HIDDEN, 2), (40, 1), (2 * HIDDEN, 0)])
def test_steps_are_those_of_torch(tmp_path, model, save, opened, recurrence, exit_dim, num_layers):
    """Three steps, whose rows continue others in any order and number; between them nothing of
    what the target computed changes."""
    tensors = tensors_of(recurrence, exit_dim=exit_dim, num_layers=num_layers)
    folder = save_as(tmp_path / "head", recurrence, tensors)
    engine = opened(build(save(model), tmp_path / "engine", folder))
    engine.allocate_kv_cache(2)
    engine.run(prompt())
    hidden, logits = engine.output("hidden").clone(), engine.output("logits").clone()
    table = model.get_input_embeddings().weight.detach().float()
    head = TorchHead(recurrence, tensors, table)

    rows, tokens = [8, 0, 3, 3], [5, 130, 0, 7]
    found = engine.run_head(FIRST, continued(tokens, rows))
    kept, state = hidden[rows], head.state(tokens, None)
    close(found["logits"], head.logits(kept, state))
    close(found["context"], torch.cat((kept, state), -1))
    source, left = FIRST, 4
    for tokens, rows in (
        ([1, 2, 3, 1, 2, 3, 8, 8, 9, 60, 61, 62], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ([4, 4, 100], [11, 2, 2]),
    ):
        engine.hand_on(source, NEXT, left)
        found, source, left = engine.run_head(NEXT, continued(tokens, rows)), NEXT, len(tokens)
        kept, state = kept[rows], head.state(tokens, state[rows])
        assert found["logits"].shape == (len(tokens), VOCAB)
        assert found["logits"].dtype == torch.float32
        close(found["logits"], head.logits(kept, state))
        close(found["context"], torch.cat((kept, state), -1))
    assert same_bits(engine.output("hidden"), hidden)  # rows that were not computed may be NaN
    assert same_bits(engine.output("logits"), logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_computes_in_the_models_dtype(tmp_path, new_model, save, dtype):
    model = new_model("llama", head_dim=64, dtype=dtype)
    tensors = tensors_of("silu")
    folder = save_head(tmp_path / "head", tensors)
    engine = open_cpu_engine(build(save(model), tmp_path / "engine", folder, dtype=dtype))
    engine.allocate_kv_cache(2)
    engine.run(prompt())
    kind = getattr(torch, dtype)
    own = {name: tensor.to(kind) for name, tensor in tensors.items()}
    head = TorchHead("silu", own, model.get_input_embeddings().weight.detach())
    found = engine.run_head(FIRST, continued([5, 9], [8, 2]))
    hidden, state = engine.output("hidden")[[8, 2]].clone(), head.state([5, 9], None)
    bound = {"float16": 5e-3, "bfloat16": 4e-2}[dtype]
    close(found["logits"], head.logits(hidden, state), bound)
    engine.hand_on(FIRST, NEXT, 2)
    found = engine.run_head(NEXT, continued([1, 2, 3], [1, 0, 1]))
    state = head.state([1, 2, 3], state[[1, 0, 1]])
    close(found["logits"], head.logits(hidden[[1, 0, 1]], state), bound)


def test_rows_that_are_nowhere_are_refused(tmp_path, target):
    engine = open_cpu_engine(
        build(target, tmp_path / "engine", save_head(tmp_path, tensors_of("")))
    )
    engine.allocate_kv_cache(2)
    engine.run(prompt())
    for name, rows in ((FIRST, engine.max_num_rows), (FIRST, -1), (NEXT, 12), (NEXT, -1)):
        with pytest.raises(AssertionError, match="logit_rows"):
            engine.run_head(name, continued([1], [rows]))
    with pytest.raises(AssertionError, match="built for at most 4"):
        engine.run_head(FIRST, continued([1] * 5, [0] * 5))


def test_a_weight_of_both_graphs_is_stored_once(tmp_path, target):
    folder = build(target, tmp_path / "engine", save_head(tmp_path / "head", tensors_of("silu")))
    plan, weights = open_engine(folder)
    stored = [name for name in weights if name.startswith(("drafter", "redrafter"))]
    assert len(stored) == 8 and sum("embed" in name for name in weights) == 1
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    for graph, rows in ((FIRST, "requests"), (NEXT, "beams")):
        for name in plan.heads[graph].outputs.values():
            assert shapes[name][0] == rows
    assert plan.sizes["requests"] == 4 and plan.sizes["beams"] == 12
    assert set(plan.given_inputs(NEXT)) == {"context", "carry"} and not plan.given_inputs(FIRST)


def test_a_head_changes_no_number_of_the_target(tmp_path, target):
    plain = tmp_path / "plain"
    run_build(plan_build(target, BuildRequest(max_batch_size=16), backend="cpu"), plain)
    head = save_head(tmp_path / "head", tensors_of("silu"))
    found = []
    for folder in (plain, build(target, tmp_path / "engine", head)):
        engine = open_cpu_engine(folder)
        engine.allocate_kv_cache(2)
        engine.run(prompt())
        found.append(engine.output("logits")[: len(TOKENS)].clone())
    assert torch.equal(*found)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_plan_for_a_gpu_gives_the_same_logits_and_has_the_kernels(
    tmp_path, target, build_engine, recurrence
):
    """By the references of the operators that a cuda plan has; then what a GPU would be given."""
    tensors = tensors_of(recurrence)
    head = save_as(tmp_path / "head", recurrence, tensors)
    folder = build_engine(
        target,
        backend="cuda",
        dtype="bfloat16",
        speculative_decoding_mode="redrafter",
        draft_model_dir=str(head),
        max_batch_size=4,
        max_num_tokens=32,
        max_seq_len=96,
        max_draft_len=6,
        **BEAMS,
    )
    plan, weights = open_with_tables(folder)
    ops = ["packed_linear", "silu", "packed_linear", "silu", "packed_linear"]
    product = ["packed_linear"] * (recurrence != "sum")
    for graph in (FIRST, NEXT):
        found = [op.op for op in plan.heads[graph].ops]
        assert found == ["embedding", *product, "recurrence", *ops, *product]
    bound = bind_plan(plan, weights, torch.zeros(plan.arena_bytes, dtype=torch.uint8))
    heads = {head.name: head for head in bind_heads(plan, bound)}
    hidden = torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(1)).bfloat16()
    bound[plan.outputs["hidden"]][:9] = hidden
    cache = torch.zeros(kv_cache_shape(plan, 2), dtype=torch.bfloat16)
    table = bound["model.embed_tokens.weight"]
    own = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    oracle = TorchHead(recurrence, own, table)
    step = continued([5, 9], [8, 2])
    ReferenceProgram(heads[FIRST].calls, heads[FIRST].row_inputs).run(step, cache)
    outputs, state = heads[FIRST].outputs(step), oracle.state([5, 9], None)
    close(outputs["logits"], oracle.logits(hidden[[8, 2]], state), 0.05)
    heads[NEXT].write({name: outputs[name] for name in ("context", "carry")})
    step = continued([1, 2, 3], [1, 0, 1])
    ReferenceProgram(heads[NEXT].calls, heads[NEXT].row_inputs).run(step, cache)
    state = oracle.state([1, 2, 3], state[[1, 0, 1]])
    close(heads[NEXT].outputs(step)["logits"], oracle.logits(hidden[[2, 8, 2]], state), 0.08)

    driver = RecordingDriver()
    limits = step_limits(plan, read_engine_config(folder).build_config)
    program = CudaProgram(
        make_calls(plan, bound), load_binaries(plan, weights, "9.0"), limits, "cpu", driver
    )
    for each, most in ((heads[FIRST], 4), (heads[NEXT], 12)):
        beside = program.beside(each.calls, each.row_inputs)
        beside.bind_kv_cache(cache)
        for rows in (1, 3, most):
            before = len(driver.prepared)
            beside.enqueue(StepShape(rows, 1, rows, rows, 1), 0)
            assert len(driver.prepared) - before == len(each.calls)
    assert read_plan(folder).max_num_beams == 12
    beams = beam_search.BeamArrays.allocate(4, 3, 2, VOCAB, "cpu")
    tokens, rows = (torch.zeros(12, dtype=torch.int32) for _ in range(2))
    drafts, parents, counts = (torch.zeros((4, 6), dtype=torch.int32) for _ in range(3))
    before = len(driver.prepared)
    searched = [
        beam_search.offer(outputs["logits"], beams, 2),
        *(beam_search.select(beams, 2, step, tokens, rows) for step in range(2)),
        beam_search.merge(beams, 2, 2, drafts, parents, counts),
    ]
    program.launch(searched, 0)
    assert len(driver.prepared) - before == 4, "the engine has the kernels of a search"
