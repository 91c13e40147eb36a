"""A planted EAGLE head: generated with the engine's other weights, right as often as chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import planted

from llmctl.builder.engine_format import (
    EAGLE_CACHE,
    EAGLE_EXTEND,
    EAGLE_FEATURES,
    EAGLE_NEXT,
    EAGLE_STATE,
)
from llmctl.builder.engine_plan import EnginePlan
from llmctl.errors import BadConfig
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.engine import kv_cache_shape
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.engines.planted_text import next_tokens, step_tokens
from llmctl.runtime.step import pack_next

ROWS, VOCAB = 40, 1024  # of the head; the target's is 4,096
TABLE = np.array([[2, 0]], np.int32)


def plan(folder: Path, quantization: str | None, form: str = "planted", **options) -> EnginePlan:
    limits = {"max_batch_size": ROWS, "eagle_layers": "0,1,1"}
    limits["speculative_decoding_mode"] = "eagle"
    return planted.plan(folder, quantization, form, **{**limits, **options})


def prompt(tokens: np.ndarray) -> StepInputs:
    count = np.arange(len(tokens), dtype=np.int32)
    return StepInputs(
        token_ids=tokens,
        position_ids=count,
        cu_q=np.array([0, len(tokens)], np.int32),
        kv_len=np.array([len(tokens)], np.int32),
        block_tables=TABLE,
        slot_mapping=TABLE[0, count // 32] * np.int32(32) + count % np.int32(32),
        logit_rows=count,
    )


@pytest.mark.parametrize("quantization", ["fp8", "w4a8_mxfp4_fp8", None])
def test_steps_say_what_the_recipe_says(tmp_path: Path, quantization: str | None) -> None:
    """By the references of the operators: behind every token of a prompt, and in a chain of tokens
    behind it, whatever the features are."""
    engine = plan(tmp_path / "target", quantization)
    head_ops = [op.op for op in engine.plan.heads[EAGLE_NEXT].ops]
    assert (quantization is None) == ("quantize" not in head_ops)
    tensors = planted.generated(engine)
    spec = engine.plan.caches[EAGLE_CACHE]
    cache = torch.zeros(
        kv_cache_shape(engine.plan, 3, EAGLE_CACHE), dtype=getattr(torch, spec.dtype)
    )
    heads = {head.name: head for head in bind_heads(engine.plan, tensors)}
    recipe = engine.config.weights
    first, stop = recipe["ordinary_tokens"]
    assert (first, stop) == (2, VOCAB), "what the head has no word for is no part of the text"
    ranks, chance = step_tokens(recipe), np.random.default_rng(0)
    features = torch.randn((ROWS, 3 * 256), generator=torch.Generator().manual_seed(1))
    found = {EAGLE_FEATURES: features.bfloat16()}
    graph, tokens = EAGLE_EXTEND, chance.integers(first, stop, ROWS).astype(np.int32)
    step = prompt(tokens)
    for place in range(ROWS, ROWS + 5):
        head = heads[graph]
        head.write(found)
        ReferenceProgram(head.calls, head.row_inputs).run(step, cache)
        outputs = head.outputs(step)
        best = outputs["logits"].topk(2).indices.numpy()
        for rank, wanted in enumerate(ranks):
            assert (best[:, rank] == wanted[tokens]).mean() >= (1, 0.9)[rank], graph
        assert torch.isinf(outputs["logits"][:, VOCAB:]).all()
        found = {EAGLE_STATE: outputs[EAGLE_STATE][-1:]}
        graph, tokens = EAGLE_NEXT, chance.integers(first, stop, 1).astype(np.int32)
        step = pack_next(tokens, np.array([place], np.int32), TABLE, 32)
    assert np.array_equal(np.sort(next_tokens(recipe)[first:stop]), np.arange(first, stop))


@pytest.mark.parametrize("form", ["dummy", "planted"])
def test_a_head_has_the_published_shape(tmp_path: Path, form: str) -> None:
    engine = plan(tmp_path / "target", "fp8", form)
    facts = engine.limits.draft_heads
    assert facts["taps"] == [0, 1, 1] and facts["draft_vocab_size"] == VOCAB
    assert (facts["hidden_size"], facts["intermediate_size"], facts["num_kv_heads"]) == (
        256,
        512,
        2,
    )
    assert engine.limits.max_draft_len == 5
    index = planted.generated(engine)["eagle.draft_index"]
    assert index.tolist() == [*range(VOCAB), *[-1] * (4096 - VOCAB)]
    for wrong, words in (
        ({"draft_model_dir": "head"}, "generate one"),
        ({"eagle_layers": None}, "the target has the layers 0 to 1"),
        ({"max_draft_len": 300}, "at most 256"),
    ):
        with pytest.raises(BadConfig, match=words):
            plan(tmp_path / "target", "fp8", form, **wrong)
