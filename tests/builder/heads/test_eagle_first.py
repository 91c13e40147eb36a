"""Heads of EAGLE-1 and 2 in an engine: transformers' own decoder layers, of which the first has no
norm before its attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.eagle import SIZES, save_head
from support.eagle_first import FirstHead

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import EAGLE_EXTEND, EAGLE_FEATURES, EAGLE_NEXT, EAGLE_STATE
from llmctl.builder.heads.eagle.checkpoint import check_head, open_head
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
)
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.step import pack_next

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
OWN = 77
HIDDEN = 64
LIMITS: dict[str, Any] = {
    "speculative_decoding_mode": "eagle",
    "max_batch_size": 2,
    "max_num_tokens": 64,
    "max_seq_len": 64,
}
FIELDS: dict[str, Any] = {**SIZES, "draft_vocab_size": None}


def prompt(tokens, rows):
    positions = np.arange(len(tokens), dtype=np.int32)
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        position_ids=positions,
        cu_q=np.array([0, len(tokens)], np.int32),
        kv_len=positions[-1:] + np.int32(1),
        block_tables=np.array([[1]], np.int32),
        slot_mapping=32 + positions,
        logit_rows=np.array(rows, np.int32),
    )


def close(found, wanted):
    torch.testing.assert_close(found.float(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("bias", "theta", "layers"), [(True, 10000.0, 1), (False, 500.0, 1), (True, 10000.0, 3)]
)
@torch.no_grad()
def test_a_head_computes_what_eagles_code_does(
    new_model, save, tmp_path, bias, theta, layers, tied
):
    """Its features have been through the target's last norm; its logits are the target's output
    matrix times what it puts out. A frozen copy of the embedding may be stored."""
    model = new_model("llama", tie_word_embeddings=tied)
    head = FirstHead(bias, theta, num_hidden_layers=layers)
    table = model.get_input_embeddings().weight
    fields = {"num_hidden_layers": layers} | ({} if theta == 10000.0 else {"rope_theta": theta})
    stored = head.tensors() | ({"embed_tokens.weight": table.clone()} if tied else {})
    folder = save_head(tmp_path / "head", stored, **{**FIELDS, **fields})
    request = BuildRequest(**LIMITS, draft_model_dir=str(folder))
    planned = plan_build(save(model), request, backend="cpu")
    run_build(planned, tmp_path / "engine")
    engine = open_cpu_engine(tmp_path / "engine")
    engine.allocate_kv_cache(3)

    count = len(TOKENS)
    logits = engine.run(prompt(TOKENS, [count - 1]))
    close(torch.from_numpy(logits[0]), model(torch.tensor([TOKENS])).logits[0, -1])
    last = engine.output("layers.2")
    engine.give_rows(EAGLE_EXTEND, EAGLE_FEATURES, [last], np.arange(count))
    found = engine.run_head(EAGLE_EXTEND, prompt([*TOKENS[1:], OWN], [5, count - 1]))

    # The last of transformers' hidden states has been through the norm.
    features = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][0]
    read = [*TOKENS[1:], OWN]
    out = head(features, table[read])
    close(found[EAGLE_STATE], out[[5, count - 1]])
    close(found["logits"], model.lm_head(out[[5, count - 1]]))
    row = 1
    for place, draft in enumerate((11, 23, 42)):
        features, read = torch.cat((features, out[-1:])), [*read, draft]
        out = head(features, table[read])
        engine.give_rows(EAGLE_NEXT, EAGLE_STATE, [found[EAGLE_STATE]], np.array([row]))
        at = np.array([count + place], np.int32)
        step = pack_next(np.array([draft], np.int32), at, np.array([[1]], np.int32), 32)
        found, row = engine.run_head(EAGLE_NEXT, step), 0
        close(found[EAGLE_STATE], out[-1:])
        close(found["logits"], model.lm_head(out[-1:]))


def test_the_targets_numbers_are_those_of_an_engine_without_a_head(new_model, save, tmp_path):
    """The last layer is computed for all tokens, and nothing else changes; for a GPU, too."""
    checkpoint = save(new_model("llama", head_dim=64, dtype="bfloat16"))
    head = save_head(tmp_path / "head", FirstHead(True, 10000.0).tensors(), **FIELDS)
    request = BuildRequest(**LIMITS, draft_model_dir=str(head))
    plan = plan_build(checkpoint, request, backend="cpu").plan
    plain = replace(request, speculative_decoding_mode="draft_tokens_external", max_draft_len=5,
                    draft_model_dir=None, outputs=("layers.2",))  # fmt: skip
    assert plan.ops == plan_build(checkpoint, plain, backend="cpu").plan.ops
    assert set(plan.outputs) == {"logits", "layers.2"}
    on_gpu = plan_build(checkpoint, request, backend="cuda", with_binaries=False).plan
    assert set(on_gpu.outputs) == set(plan.outputs) and on_gpu.head_caches == plan.head_caches


def check(folder, hidden=HIDDEN, vocab=131):
    return check_head(open_head(folder), (2,), hidden, vocab)


def test_which_of_the_two_a_head_is_follows_from_its_tensors(tmp_path):
    tensors = FirstHead(True, 10000.0).tensors()
    head = check(save_head(tmp_path / "a", tensors, **FIELDS))
    assert head.version == 1 and head.has_fc_bias and not head.has_embedding
    torch.save(tensors, tmp_path / "a/pytorch_model.bin")
    (tmp_path / "a/model.safetensors").unlink()
    assert check(tmp_path / "a").version == 1
    with pytest.raises(MissingTensor, match="EAGLE-3 head: .*hidden_norm"):
        changed = {**tensors, "norm.weight": torch.ones(64), "fc.weight": torch.ones(64, 64)}
        check(save_head(tmp_path / "b", changed, **FIELDS))


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        ({"fc.weight": torch.ones(64, 64)}, PairMismatch, "columns of fc.weight 64"),
        ({"fc.bias": torch.ones(63)}, BadTensorShape, "fc.bias"),
        ({"layers.0.input_layernorm.weight": torch.ones(64)}, UnexpectedTensor, "no EAGLE-1 head"),
        ({"layers.0.mlp.up_proj.weight": None}, MissingTensor, "EAGLE-1 head: layers.0.mlp.up"),
        ({"layers.0.self_attn.q_proj.weight": torch.ones(64, 128)}, BadTensorShape, "q_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, error, found):
    tensors = {**FirstHead(True, 10000.0).tensors(), **change}
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(error, match=found):
        check(save_head(tmp_path, stored, **FIELDS))


def test_config_json_may_say_whether_there_is_a_bias(tmp_path):
    with_bias, without = (FirstHead(bias, 10000.0).tensors() for bias in (True, False))
    assert check(save_head(tmp_path / "a", with_bias, **FIELDS, bias=True)).has_fc_bias
    assert not check(save_head(tmp_path / "b", without, **FIELDS, bias=False)).has_fc_bias
    with pytest.raises(MissingTensor, match="EAGLE-1 head: fc.bias"):
        check(save_head(tmp_path / "c", without, **FIELDS, bias=True))
    with pytest.raises(UnexpectedTensor, match="fc.bias, which no EAGLE-1 head has"):
        check(save_head(tmp_path / "d", with_bias, **FIELDS, bias=False))


def test_the_head_of_another_target_is_refused(new_model, save, tmp_path):
    folder = save_head(tmp_path / "head", FirstHead(False, 10000.0).tensors(), **FIELDS)
    for sizes in ({"hidden": 128}, {"vocab": 140}):
        with pytest.raises(PairMismatch, match="the target wants"):
            check(folder, **sizes)
    request = BuildRequest(**LIMITS, draft_model_dir=str(folder), eagle_layers="0,1,1")
    with pytest.raises(BadConfig, match="what the last layer puts out"):
        plan_build(save(new_model("llama")), request, backend="cpu")
    save_file({}, folder / "model.safetensors")
    with pytest.raises(MissingTensor, match="it is no EAGLE head"):
        check(folder)
