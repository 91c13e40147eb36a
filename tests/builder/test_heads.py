"""Graphs beside the base graph: recorded, built and run on what the base graph computed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import open_on_fake_device
from support.cuda_build import HEADS
from support.driver import RecordingDriver
from support.heads import MODE, ROW, TorchHeads

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan, read_engine_config, read_plan
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.builder.step_limits import step_limits
from llmctl.cli.main import execute
from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls, open_cpu_engine
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.engines.open_tensorrt import load_binaries
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.step import pack_rows

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
LIMITS = {"max_batch_size": 2, "max_num_tokens": 64, "max_draft_len": 15, "max_seq_len": 64}


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    monkeypatch.setitem(SPECULATIVE_MODES, MODE, ROW)


@pytest.fixture
def make(new_model, save):
    """make(tied, dtype) -> (heads of plain torch, a checkpoint of a model and them)."""

    def made(tied=False, dtype="float32"):
        fields = {**HEADS, "gain": 0.5, "tie_word_embeddings": tied}
        model = new_model("llama", dtype=dtype, **fields)
        heads = TorchHeads(model, 64)
        return heads, heads.add_to(save(model), getattr(torch, dtype))

    return made


def prompt(tokens=TOKENS) -> StepInputs:
    count = np.arange(len(tokens), dtype=np.int32)
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        position_ids=count,
        cu_q=np.array([0, len(tokens)], np.int32),
        kv_len=np.array([len(tokens)], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        slot_mapping=count,
        logit_rows=count,
    )


def of_tokens(tokens: list[int], rows: list[int]) -> StepInputs:
    return replace(pack_rows(len(tokens), rows), token_ids=np.array(tokens, np.int32))


def on_the_cpu(folder):
    return open_cpu_engine(folder)


def on_a_fake_device(folder):
    return open_on_fake_device(folder, DeviceQueue("cpu"))[0]


def close(found, wanted, tolerance=2e-5):
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("opened", [on_the_cpu, on_a_fake_device])
def test_heads_compute_what_torch_does(make, build_engine, opened, tied):
    heads, checkpoint = make(tied)
    engine = opened(build_engine(checkpoint, speculative_decoding_mode=MODE, **LIMITS))
    plain = open_cpu_engine(build_engine(checkpoint, **LIMITS))
    for each in (engine, plain):
        each.allocate_kv_cache(2)
        each.run(prompt())
    logits, hidden = engine.output("logits")[:9].clone(), engine.output("hidden")[:9].clone()
    assert torch.equal(logits, plain.output("logits")[:9]), "heads change no number"

    chosen = [8, 2, 2]
    found = engine.run_head("medusa", pack_rows(9, chosen))
    close(found["logits"], heads.medusa(hidden[chosen]))

    state, tokens = hidden[[8, 2]], ([5, 7], [130, 0])
    engine.give_rows("recurrent", "state", [state], np.arange(2))
    first = engine.run_head("recurrent", of_tokens(tokens[0], [0, 1]))
    wanted, after = heads.recurrent(tokens[0], state)
    close(first["state"], wanted)
    close(first["logits"], after)
    kept = first["state"].clone()
    engine.run_head("medusa", pack_rows(9, [0]))
    assert torch.equal(first["state"], kept), "one head leaves alone what another one computed"
    engine.hand_on("recurrent", "recurrent", 2)
    second = engine.run_head("recurrent", of_tokens(tokens[1], [1]))
    wanted, after = heads.recurrent(tokens[1], wanted)
    close(second["state"], wanted)
    close(second["logits"], after[1:])
    assert torch.equal(engine.output("logits")[:9], logits), "what the base computed is there"
    assert torch.equal(engine.output("hidden")[:9], hidden)
    close(engine.run_head("medusa", pack_rows(9, [4]))["logits"], heads.medusa(hidden[[4]]))


def stored(plan: Plan) -> set[str]:
    return {tensor.name for tensor in plan.tensors if tensor.kind == "weight"}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_of_several_graphs_is_stored_once(make, backend, tied):
    _, checkpoint = make(tied, "bfloat16")
    limits = {"dtype": "bfloat16", **LIMITS}

    def plan(**fields):
        request = BuildRequest(**limits, **fields)
        return plan_build(checkpoint, request, backend=backend, with_binaries=False).plan

    base, plain = plan(speculative_decoding_mode=MODE), plan(outputs=("hidden",))
    names = {f"{graph}.linear.{part}" for graph in base.heads for part in ("weight", "bias")}
    assert stored(base) == stored(plain) | names
    assert (base.ops, base.outputs) == (plain.ops, plain.outputs), "the base graph is what it was"
    assert Plan.from_json(base.to_json()) == base
    assert list(base.graphs) == ["base", "medusa", "recurrent"]
    assert base.given_inputs("recurrent") == {"state": "recurrent.state"}
    assert base.heads["medusa"].inputs == {"hidden": base.outputs["hidden"]}
    assert not base.given_inputs("medusa")


@pytest.mark.usefixtures("stand_ins")
def test_a_plan_for_a_gpu_computes_the_same_and_has_the_kernels(make, build_engine):
    heads, checkpoint = make(dtype="bfloat16")
    folder = build_engine(checkpoint, backend="cuda", speculative_decoding_mode=MODE, **LIMITS)
    plan, weights = open_with_tables(folder)
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    tensors = bind_plan(plan, weights, arena)
    cache = torch.zeros(kv_cache_shape(plan, 2), dtype=getattr(torch, plan.kv_cache.dtype))
    calls = make_calls(plan, tensors)
    ReferenceProgram(calls).run(prompt(), cache)
    hidden = tensors[plan.outputs["hidden"]][:9].clone()
    medusa, recurrent = bind_heads(plan, tensors)
    step = pack_rows(9, [8, 2])
    ReferenceProgram(medusa.calls, medusa.row_inputs).run(step, cache)
    close(medusa.outputs(step)["logits"], heads.medusa(hidden[[8, 2]].float()), 0.05)
    step = of_tokens([5, 7], [0, 1])
    recurrent.write({"state": hidden[[8, 2]]})
    ReferenceProgram(recurrent.calls, recurrent.row_inputs).run(step, cache)
    wanted = heads.recurrent([5, 7], hidden[[8, 2]].float())[1]
    close(recurrent.outputs(step)["logits"], wanted, 0.05)

    driver = RecordingDriver()
    limits = step_limits(plan, read_engine_config(folder).build_config)
    program = CudaProgram(calls, load_binaries(plan, weights, "9.0"), limits, "cpu", driver)
    for head in (medusa, recurrent):
        beside = program.beside(head.calls, head.row_inputs)
        beside.bind_kv_cache(cache)
        for rows in (1, 3, limits.max_num_rows):
            before = len(driver.prepared)
            beside.enqueue(StepShape(rows, 1, rows, rows, 1), 0)
            launched = driver.prepared[before:]
            assert len(launched) == len(head.calls)
            assert any(item.kernel.name.startswith("silu") for item in launched)


def test_the_arena_keeps_what_graphs_hand_to_each_other(make):
    """From when the base graph ends nothing overlaps inputs and outputs; what one graph alone has
    lies where others have theirs."""
    _, checkpoint = make()
    request = BuildRequest(speculative_decoding_mode=MODE, **LIMITS)
    plan = plan_build(checkpoint, request, backend="cpu").plan
    rows = {"tokens": plan.max_num_tokens, "rows": plan.max_num_rows}
    spans = {
        tensor.name: (
            tensor.offset,
            tensor.offset + 4 * rows[str(tensor.shape[0])] * int(tensor.shape[1]),
        )
        for tensor in plan.tensors
        if tensor.kind == "activation"
    }
    kept = set(plan.outputs.values())
    for head in plan.heads.values():
        kept |= {*head.inputs.values(), *head.outputs.values()}
    inner = {t for head in plan.heads.values() for op in head.ops for t in op.outputs.values()}
    for name in kept:
        for other in (kept | inner) - {name}:
            assert spans[name][1] <= spans[other][0] or spans[other][1] <= spans[name][0]
    own = {graph: set(spans) & {t for op in g.ops for t in op.outputs.values()} - kept
           for graph, g in plan.graphs.items()}  # fmt: skip
    assert any(
        spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]
        for a in own["base"]
        for b in own["medusa"]
    )


def test_inspect_names_the_graphs(make, build_engine, capsys):
    _, checkpoint = make()
    folder = build_engine(checkpoint, speculative_decoding_mode=MODE, **LIMITS)
    assert execute(["inspect", str(folder), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    shown = {head["name"]: head for head in described["heads"]}
    assert list(shown) == ["medusa", "recurrent"]
    assert shown["medusa"]["inputs"] == {"hidden": "base.hidden"}
    assert shown["recurrent"]["inputs"] == {"state": "given"}
    assert [op["op"] for op in shown["medusa"]["ops"]] == [
        op.op for op in read_plan(folder).heads["medusa"].ops
    ]
    assert execute(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "head medusa: hidden (base.hidden) -> logits" in text
    assert "head recurrent: state (given) -> state, logits" in text


def test_what_cannot_be_is_refused(make, build_engine):
    _, checkpoint = make()
    engine = open_cpu_engine(build_engine(checkpoint, speculative_decoding_mode=MODE, **LIMITS))
    engine.allocate_kv_cache(2)
    with pytest.raises(Unsupported, match=r"without the head 'eagle'; it has medusa, recurrent"):
        engine.run_head("eagle", pack_rows(1, [0]))
    request = BuildRequest(speculative_decoding_mode=MODE, **LIMITS)
    with pytest.raises(Unsupported, match=r"head medusa, head recurrent, hidden.*tensorrt-rtx"):
        plan_build(checkpoint, replace(request, dtype="bfloat16"), backend="tensorrt-rtx")
