"""An EAGLE-3 head in an engine computes what plain torch does, on both backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda import open_on_fake_device
from support.cuda_build import HEADS
from support.eagle import HEAD_FORMS, LAYOUTS, TorchHead, make_head, save_head

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import (
    EAGLE_EXTEND,
    EAGLE_NEXT,
    EAGLE_STATE,
    open_engine,
)
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.drafting.eagle.head import EngineHead
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.step import pack_next

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
LIMITS: dict[str, Any] = {
    "speculative_decoding_mode": "eagle",
    "max_batch_size": 2,
    "max_num_tokens": 64,
    "max_seq_len": 64,
    "eagle_layers": "0,1,1",
}


def prompt(tokens, rows, start=0) -> StepInputs:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        position_ids=positions,
        cu_q=np.array([0, len(tokens)], np.int32),
        kv_len=positions[-1:] + np.int32(1),
        block_tables=np.array([[1]], np.int32),
        slot_mapping=32 + positions,
        logit_rows=np.array(rows, np.int32),
    )


def on_the_cpu(folder):
    return open_cpu_engine(folder)


def on_a_fake_device(folder):
    return open_on_fake_device(folder, DeviceQueue("cpu"))[0]


def close(found, wanted):
    torch.testing.assert_close(found.float(), wanted, rtol=2e-5, atol=2e-5)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # (of the head, of its config.json)
    **HEAD_FORMS,
    "layers": ({"layers": 3, "qk_norm": True}, {"num_hidden_layers": 3, "norm_output": True}),
    "windows": ({"layers": 2}, {"num_hidden_layers": 2, "sliding_window": 5,
                                "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "layout", "opened"),
    [(form, layout, on_the_cpu) for form in FORMS for layout in LAYOUTS]
    + [(form, "eagle", on_a_fake_device) for form in ("default", "fc_norm", "layers")],
)
def test_a_head_computes_what_torch_does(new_model, save, tmp_path, form, layout, opened):
    """A prompt in two chunks, then a chain of drafts. No rounding but float32's."""
    sizes, fields = FORMS[form]
    tensors = make_head(5, **sizes)
    head = save_head(tmp_path / "head", tensors, layout, **fields)
    model = new_model("llama", rope_theta=777.0)
    request = BuildRequest(**LIMITS, draft_model_dir=str(head))
    folder = tmp_path / "engine"
    run_build(plan_build(save(model), request, backend="cpu"), folder)
    engine = opened(folder)
    engine.allocate_kv_cache(3)
    assert engine.config.build_config["max_draft_len"] == 5

    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        table = model.get_input_embeddings().weight
    features = torch.cat([states[layer][0] for layer in (0, 1, 1)], dim=-1)
    windows = {"layers": (0, 0, 0), "windows": (5, 0)}.get(form, (0,))
    wanted = TorchHead.of_config(tensors, table, fields, windows)
    shifted = [*TOKENS[1:], 77]
    out = wanted.out(wanted.fc(features), shifted)
    for start, stop, rows in ((0, 8, [5, 7]), (8, 12, [3])):
        engine.run(prompt(TOKENS[start:stop], [stop - start - 1], start))
        for name, outputs in EngineHead(engine).features().items():
            engine.give_rows(EAGLE_EXTEND, name, outputs, np.arange(stop - start))
        step = prompt(shifted[start:stop], rows, start)
        found = engine.run_head(EAGLE_EXTEND, step)
        picked = [start + row for row in rows]
        close(found[EAGLE_STATE], out[picked])
        close(found["logits"], wanted.logits(out[picked]))

    drafts = wanted.chain(features, shifted, 4)
    g, read = wanted.fc(features), shifted
    for place, draft in enumerate(drafts):
        assert int(found["logits"][0].argmax()) == draft
        g, read = torch.cat((g, out[-1:])), [*read, draft]
        out = wanted.out(g, read)
        at = np.array([len(TOKENS) + place], np.int32)
        step = pack_next(np.array([draft], np.int32), at, np.array([[1]], np.int32), 32)
        engine.give_rows(EAGLE_NEXT, EAGLE_STATE, [found[EAGLE_STATE]], np.array([0]))
        found = engine.run_head(EAGLE_NEXT, step)
        close(found[EAGLE_STATE], out[-1:])
        close(found["logits"], wanted.logits(out[-1:]))


def test_the_targets_numbers_are_those_of_an_engine_without_a_head(new_model, save, tmp_path):
    """And the plan for a GPU has the same weights and outputs, and fused products in the head."""
    checkpoint = save(new_model("llama", head_dim=64, dtype="bfloat16"))
    head = save_head(tmp_path / "head", make_head(head_dim=64), head_dim=64)
    request = BuildRequest(**LIMITS, draft_model_dir=str(head))
    on_cpu, on_gpu = (
        plan_build(checkpoint, request, backend=backend, with_binaries=False).plan
        for backend in ("cpu", "cuda")
    )
    plain = replace(
        request, speculative_decoding_mode="draft_tokens_external", max_draft_len=5,
        eagle_layers=None, draft_model_dir=None, outputs=("layers.0", "layers.1"),
    )  # fmt: skip
    assert on_cpu.ops == plan_build(checkpoint, plain, backend="cpu").plan.ops
    assert on_cpu.head_caches == on_gpu.head_caches
    assert on_cpu.head_caches["eagle"].num_layers == 1
    assert set(on_cpu.outputs) == set(on_gpu.outputs) == {"logits", "layers.0", "layers.1"}
    ops = [op.op for op in on_gpu.heads[EAGLE_NEXT].ops]
    assert ops.count("packed_linear_rope_kv") == ops.count("packed_linear_swiglu") == 1
    assert ops[-1] == "expand_logits"
    extend = on_cpu.heads[EAGLE_EXTEND].ops
    gathers = [op.inputs["x"] for op in extend if op.op == "gather_rows"]
    assert len(gathers) == 2, "behind attention, and of the residual: the MLP runs for a row each"


@pytest.mark.usefixtures("stand_ins")
def test_an_engine_for_a_gpu_has_the_kernels_of_its_head(new_model, save, tmp_path):
    """Those that its steps launch, or it would not open."""
    checkpoint = save(new_model("llama", dtype="bfloat16", **HEADS))
    head = save_head(tmp_path / "head", make_head(**HEADS), **HEADS)
    request = BuildRequest(**LIMITS, draft_model_dir=str(head))
    folder = tmp_path / "engine"
    run_build(plan_build(checkpoint, request, backend="cuda"), folder)
    plan, _ = open_engine(folder)
    names = [kernel.name for kernel in plan.kernels]
    assert any(name.startswith("concat.") for name in names)
    assert any(name.startswith("expand_logits.") for name in names)
