"""Outputs beside logits: what layers read, and what the output projection reads."""

from __future__ import annotations

import pytest
import torch
from support.cuda_build import HEADS

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.engines.engine import bind_plan
from llmctl.runtime.engines.rotary_tables import open_with_tables

OUTPUTS = ("hidden", "layers.0", "layers.1", "layers.3")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture
def model(new_model, save):
    """(the model, its checkpoint), four layers."""
    made = new_model("llama", num_hidden_layers=4, gain=0.5, **HEADS)
    return made, save(made)


def wanted(model) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        states = model(
            input_ids=torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False
        ).hidden_states
    # transformers norms the last of the states itself.
    found = {f"layers.{layer}": states[layer][0] for layer in range(4)}
    return {**found, "hidden": states[-1][0]}


def test_an_engine_gives_what_transformers_does(
    model, build_engine, open_test_engine, program_name
):
    plain = open_test_engine(build_engine(model[1], max_seq_len=64), program_name)
    engine = open_test_engine(build_engine(model[1], outputs=OUTPUTS, max_seq_len=64), program_name)
    assert set(engine.plan.outputs) == {"logits", *OUTPUTS}
    logits = engine.run(TOKENS)
    assert torch.equal(logits, plain.run(TOKENS)), "outputs change no number"
    for name, expected in wanted(model[0]).items():
        if name in OUTPUTS:
            found = engine.output(name)[: len(TOKENS)]
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, msg=name)
    again = engine.run([7, 8], start=len(TOKENS))
    assert torch.equal(again, plain.run([7, 8], start=len(TOKENS)))


@pytest.mark.usefixtures("stand_ins")
def test_a_plan_for_a_gpu_has_them_too(model, build_engine, open_test_engine):
    folder = build_engine(
        model[1], outputs=OUTPUTS, max_seq_len=64, backend="cuda", dtype="bfloat16"
    )
    engine = open_test_engine(folder, "reference")
    engine.run(TOKENS)
    for name, expected in wanted(model[0]).items():
        if name in OUTPUTS:
            found = engine.output(name)[: len(TOKENS)].float()
            error = (found - expected).norm() / expected.norm()
            assert error < 0.02, (name, error)


def test_what_is_an_output_keeps_its_bytes(model, build_engine):
    """No activation that is written later lies where an output is."""
    plan, tensors = open_with_tables(build_engine(model[1], outputs=OUTPUTS, max_seq_len=64))
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    bound = bind_plan(plan, tensors, arena)
    spans = {
        tensor.name: (tensor.offset, tensor.offset + bound[tensor.name].nbytes)
        for tensor in plan.tensors
        if tensor.kind == "activation"
    }
    for output in plan.outputs.values():
        writers = [i for i, op in enumerate(plan.ops) if output in op.outputs.values()]
        first, end = spans[output]
        for op in plan.ops[writers[-1] + 1 :]:
            for name in op.outputs.values():
                assert spans[name][1] <= first or spans[name][0] >= end, (output, name)


def test_outputs_that_are_not_there_are_named(model):
    with pytest.raises(
        BadConfig, match=r"no output 'layers\.5'; hidden and layers\.0 to layers\.4"
    ):
        plan_build(model[1], BuildRequest(outputs=("layers.5",)), backend="cpu")
    with pytest.raises(Unsupported, match="beside logits"):
        plan_build(
            model[1], BuildRequest(outputs=("hidden",), dtype="bfloat16"), backend="tensorrt-rtx"
        )
