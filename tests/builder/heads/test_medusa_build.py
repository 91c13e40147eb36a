"""Engines with Medusa heads: their graph against torch modules, what is stored, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.cuda_build import HEADS
from support.driver import RecordingDriver
from support.medusa import make_heads, save_heads, torch_heads

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config, read_plan
from llmctl.builder.step_limits import step_limits
from llmctl.errors import BadConfig, BadTensorValue, CheckpointNotFound, PairMismatch, Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.plugins.device_loop.tree_kernel import tree_kernels
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
from llmctl.runtime.step import pack_rows

HIDDEN, VOCAB = 64, 131
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
MEDUSA = {"speculative_decoding_mode": "medusa", "max_batch_size": 4}


@pytest.fixture
def target(new_model, save) -> Path:
    return save(new_model("llama", **HEADS))


def heads_in(folder: Path, num_heads: int = 3, num_layers: int = 1) -> Path:
    return save_heads(folder / "heads", make_heads(num_heads, num_layers, HIDDEN, VOCAB))


def build(target: Path, folder: Path, heads: Path | None, **fields) -> Path:
    request = BuildRequest(**MEDUSA, draft_model_dir=heads and str(heads), **fields)
    run_build(plan_build(target, request, backend="cpu"), folder)
    return folder


def run(engine: Engine) -> None:
    """One prompt, with a row of logits for each token."""
    engine.allocate_kv_cache(2)
    positions = np.arange(len(TOKENS), dtype=np.int32)
    engine.run(
        StepInputs(
            token_ids=np.array(TOKENS, np.int32),
            position_ids=positions,
            cu_q=np.array([0, len(TOKENS)], np.int32),
            kv_len=np.array([len(TOKENS)], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            slot_mapping=positions,
            logit_rows=positions,
        )
    )


@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_those_of_torch_modules(tmp_path, target, num_layers, dtype):
    folder = heads_in(tmp_path, num_layers=num_layers)
    engine = open_cpu_engine(build(target, tmp_path / "engine", folder, dtype=dtype))
    run(engine)
    modules = torch_heads(make_heads(3, num_layers, HIDDEN, VOCAB)).to(getattr(torch, dtype))
    rows = [8, 0, 3, 3]
    hidden = engine.output("hidden")[rows].clone()
    found = engine.run_head("medusa", pack_rows(engine.max_num_rows, rows))
    assert set(found) == {"logits.0", "logits.1", "logits.2"}
    bound = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    for head, module in enumerate(modules):
        with torch.no_grad():
            wanted = module(hidden).float()
        logits = found[f"logits.{head}"]
        assert logits.dtype == torch.float32 and logits.shape == (4, VOCAB)
        torch.testing.assert_close(logits, wanted, rtol=bound, atol=bound)
    best = engine.top_ids([found["logits.2"]], 10)
    assert np.array_equal(best[0], found["logits.2"].sort(descending=True).indices[:, :10])


def test_a_row_of_heads_is_the_same_alone_and_among_others(tmp_path, target):
    engine = open_cpu_engine(build(target, tmp_path / "engine", heads_in(tmp_path)))
    run(engine)

    def logits(*rows: int) -> torch.Tensor:
        step = pack_rows(engine.max_num_rows, rows)
        return engine.run_head("medusa", step)["logits.1"].clone()

    alone = logits(4)[0]
    assert torch.equal(alone, logits(1, 4, 7)[1]) and torch.equal(alone, logits(8, 6, 5, 4)[3])


def test_heads_have_room_for_one_row_of_each_sequence(tmp_path, target):
    """Not for one of each draft: with 4 heads of a large vocabulary that would be gigabytes."""
    plan = read_plan(build(target, tmp_path / "engine", heads_in(tmp_path)))
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    for name in plan.heads["medusa"].outputs.values():
        assert shapes[name] == ("requests", VOCAB)
    assert plan.sizes["requests"] == 4 and plan.sizes["rows"] == 4 * 62


def test_heads_change_no_number_of_the_target(tmp_path, target):
    plain = tmp_path / "plain"
    run_build(plan_build(target, BuildRequest(max_batch_size=16), backend="cpu"), plain)
    found = []
    for folder in (plain, build(target, tmp_path / "engine", heads_in(tmp_path))):
        engine = open_cpu_engine(folder)
        run(engine)
        found.append(engine.output("logits")[:1].clone())
    assert torch.equal(*found)


def test_the_engine_says_what_it_was_built_with(tmp_path, target):
    config = read_engine_config(build(target, tmp_path / "a", heads_in(tmp_path, num_layers=2)))
    facts = config.build_config["draft_heads"]
    assert (facts["num_heads"], facts["num_layers"]) == (3, 2)
    assert len(facts["choices"]) == config.build_config["max_draft_len"] == 61, "4 heads have 63"
    assert config.build_config["speculative_decoding_mode"] == 4, "as TensorRT-LLM counts"
    assert "medusa_lm_head.safetensors" in config.source["files"]


def test_fewer_heads_and_an_own_tree(tmp_path, target):
    choices = "[[0, 0], [1], [2, 0]]"
    fields = {"num_medusa_heads": 2, "medusa_choices": choices, "max_draft_len": 9}
    folder = build(target, tmp_path / "engine", heads_in(tmp_path), **fields)
    build_config = read_engine_config(folder).build_config
    assert build_config["draft_heads"]["choices"] == [[0], [0, 0], [1], [2], [2, 0]]
    assert build_config["max_draft_len"] == 9, "room for larger trees"
    assert set(read_plan(folder).heads["medusa"].outputs) == {"logits.0", "logits.1"}
    assert not any("medusa_head.2" in name for name in open_engine(folder)[1])


def test_a_draft_length_cuts_the_published_tree(tmp_path, target):
    folder = build(target, tmp_path / "engine", heads_in(tmp_path), max_draft_len=6)
    choices = read_engine_config(folder).build_config["draft_heads"]["choices"]
    assert choices == [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0]]


def test_pickled_and_safe_heads_give_the_same_engine(tmp_path, target):
    safe = heads_in(tmp_path)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(make_heads(3, 1, HIDDEN, VOCAB), pickled / "medusa_lm_head.pt")
    files = [
        (build(target, tmp_path / name, heads) / "rank0.engine").read_bytes()
        for name, heads in (("a", safe), ("b", pickled))
    ]
    assert files[0] == files[1]
    source = read_engine_config(tmp_path / "b").source["files"]["medusa_lm_head.pt"]
    assert len(source["header_sha256"]) == 64


def test_heads_beside_an_fp8_target_keep_their_dtype(tmp_path, quantized):
    folder = build(quantized, tmp_path / "engine", heads_in(tmp_path), dtype="bfloat16")
    plan, weights = open_engine(folder)
    assert weights["medusa_head.0.0.linear.weight"].dtype == torch.bfloat16
    assert "float8_e4m3fn" in {tensor.dtype for tensor in plan.tensors}
    run(open_cpu_engine(folder))


@pytest.mark.parametrize(
    ("fields", "error", "found"),
    [
        ({"num_medusa_heads": 4}, BadConfig, "--num-medusa-heads is 4; .* holds 3 heads"),
        ({"num_medusa_heads": 0}, BadConfig, "num_medusa_heads is 0"),
        ({"medusa_choices": "[[0, 0, 0, 0]]"}, BadConfig, "a path of 4 tokens; 3 heads draft 3"),
        ({"medusa_choices": "[[10]]"}, BadConfig, r"the path \[10\]"),
        (
            {"medusa_choices": "[[0], [0, 0], [1]]", "max_draft_len": 2},
            BadConfig,
            "has 3 nodes, --max-draft-len is 2",
        ),
        ({"speculative_decoding_mode": None}, BadConfig, "--draft-model-dir is for .* medusa"),
        (
            {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": 4},
            BadConfig,
            "the mode is draft_tokens_external",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, target, fields, error, found):
    request = {**MEDUSA, "draft_model_dir": str(heads_in(tmp_path)), **fields}
    with pytest.raises(error, match=found):
        plan_build(target, BuildRequest(**request), backend="cpu")


@pytest.mark.parametrize(("hidden", "vocab"), [(32, VOCAB), (HIDDEN, 130)])
def test_heads_of_another_target_are_refused(tmp_path, target, hidden, vocab):
    folder = save_heads(tmp_path / "heads", make_heads(2, 1, hidden, vocab))
    request = BuildRequest(**MEDUSA, draft_model_dir=str(folder))
    with pytest.raises(PairMismatch, match="the target has"):
        plan_build(target, request, backend="cpu")


def test_heads_that_are_nowhere_are_refused(tmp_path, target):
    with pytest.raises(BadConfig, match="holds no medusa_head tensors"):
        plan_build(target, BuildRequest(**MEDUSA), backend="cpu")
    request = BuildRequest(**MEDUSA, draft_model_dir=str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="neither"):
        plan_build(target, request, backend="cpu")


def test_backends_without_heads_refuse_them(tmp_path, target):
    request = BuildRequest(**MEDUSA, draft_model_dir=str(heads_in(tmp_path)), dtype="bfloat16")
    with pytest.raises(Unsupported, match="medusa"):
        plan_build(target, request, backend="tensorrt-rtx")


def test_a_weight_that_is_no_number_is_refused_when_it_is_read(tmp_path, target):
    tensors = make_heads(3, 1, HIDDEN, VOCAB)
    tensors["1.0.linear.weight"][5, 7] = float("nan")
    folder = save_heads(tmp_path / "heads", tensors)
    with pytest.raises(BadTensorValue, match="medusa_head.1.0.linear.weight holds NaN"):
        build(target, tmp_path / "engine", folder)
    assert not (tmp_path / "engine").exists()


@pytest.mark.usefixtures("stand_ins")
def test_a_plan_for_a_gpu_gives_the_same_logits_and_has_the_kernels(tmp_path, target, build_engine):
    """By the references of the operators that a cuda plan has; then what a GPU would be given."""
    folder = build_engine(
        target,
        backend="cuda",
        dtype="bfloat16",
        speculative_decoding_mode="medusa",
        draft_model_dir=str(heads_in(tmp_path)),
        max_batch_size=4,
        max_num_tokens=32,
        max_draft_len=7,
        max_seq_len=96,
    )
    plan, weights = open_with_tables(folder)
    ops = [op.op for op in plan.heads["medusa"].ops]
    assert ops == ["gather_rows", *["packed_linear", "silu", "packed_linear"] * 3]
    tensors = bind_plan(plan, weights, torch.zeros(plan.arena_bytes, dtype=torch.uint8))
    (head,) = bind_heads(plan, tensors)
    hidden = torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(1))
    tensors[plan.outputs["hidden"]][:9] = hidden.bfloat16()
    cache = torch.zeros(kv_cache_shape(plan, 2), dtype=torch.bfloat16)
    step = pack_rows(9, [8, 2])
    ReferenceProgram(head.calls, head.row_inputs).run(step, cache)
    outputs = head.outputs(step)
    for index, module in enumerate(torch_heads(make_heads(3, 1, HIDDEN, VOCAB)).bfloat16()):
        with torch.no_grad():
            wanted = module(hidden[[8, 2]].bfloat16()).float()
        torch.testing.assert_close(outputs[f"logits.{index}"], wanted, rtol=0.04, atol=0.04)
    driver = RecordingDriver()
    limits = step_limits(plan, read_engine_config(folder).build_config)
    binaries = load_binaries(plan, weights, "9.0")
    program = CudaProgram(make_calls(plan, tensors), binaries, limits, "cpu", driver)
    beside = program.beside(head.calls, head.row_inputs)
    beside.bind_kv_cache(cache)
    for rows in (1, 3, 4):
        before = len(driver.prepared)
        beside.enqueue(StepShape(limits.max_num_rows, 1, rows, limits.max_num_rows, 1), 0)
        assert len(driver.prepared) - before == len(head.calls)
    kernels = {kernel.name for kernel in plan.kernels}
    sizes = (limits.max_batch_size, limits.max_draft_len, VOCAB)
    assert kernels >= {spec.name for spec in tree_kernels(*sizes)}, "rounds that draft trees"
