"""A planted ReDrafter head: generated with the engine's other weights, right as often as chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import planted
from support.lockstep import InLockstep
from support.planted import ACCEPTANCE, generated, in_lockstep

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT
from llmctl.builder.engine_plan import EnginePlan
from llmctl.errors import BadConfig
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.engines.engine import kv_cache_shape
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.engines.lockstep import lockstep_parts, rank_stride
from llmctl.runtime.engines.planted_text import next_tokens, step_tokens
from llmctl.runtime.step import pack_continued

ROWS = 40


def planned(folder: Path, quantization: str | None, form: str = "planted", **options) -> EnginePlan:
    limits = {"max_batch_size": ROWS, "redrafter_num_beams": 2}
    limits["speculative_decoding_mode"] = "redrafter"
    return planted.plan(folder, quantization, form, **{**limits, **options})


@pytest.mark.parametrize(
    ("quantization", "head", "ranks"),
    [
        *(("fp8", None, 1), ("w4a8_mxfp4_fp8", None, 1), (None, None, 1)),
        *(("fp8", "w4a8_mxfp4_fp8", 1), ("fp8", None, 2), (None, None, 4)),
        ("fp8", "w4a8_mxfp4_fp8", 4),
    ],
)
def test_steps_say_what_the_recipe_says(
    tmp_path: Path, quantization: str | None, head: str | None, ranks: int
) -> None:
    """By the references of the operators, all ranks in turn; the state of earlier tokens changes
    nothing."""
    engine = planned(tmp_path / "target", quantization, head_qformat=head, tp_size=ranks)
    if head is not None:
        weights = [t for t in engine.plan.tensors if t.name.endswith("weight") and len(t.shape) > 1]
        coded = {t.name.startswith("redrafter.") for t in weights if t.dtype == "uint8"}
        assert coded == {True} and any(t.dtype == "float8_e4m3fn" for t in weights)
    head_ops = [op.op for op in engine.plan.heads[REDRAFTER_NEXT].ops]
    assert (quantization is None) == ("quantize" not in head_ops)
    plan, tensors = in_lockstep(engine) if ranks > 1 else (engine.plan, generated(engine))
    parts = lockstep_parts(rank_stride(engine.plan))
    cache = torch.zeros(
        kv_cache_shape(engine.plan, 1), dtype=getattr(torch, engine.plan.kv_cache.dtype)
    )
    heads = {head.name: head for head in bind_heads(plan, tensors)}
    hidden = tensors[plan.outputs["hidden"]]
    hidden[:ROWS] = torch.randn(ROWS, hidden.shape[1], generator=torch.Generator().manual_seed(1))
    recipe = engine.config.weights
    first, stop = recipe["ordinary_tokens"]
    likeliest = step_tokens(recipe)
    generator = np.random.default_rng(0)
    before = heads[REDRAFTER_NEXT]
    for graph in (REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_NEXT):
        tokens = generator.integers(first, stop, ROWS).astype(np.int32)
        head = heads[graph]
        if graph == REDRAFTER_NEXT:
            head.take(before, ROWS)
        before = head
        step = pack_continued(tokens, generator.permutation(ROWS).astype(np.int32))
        if ranks == 1:
            ReferenceProgram(head.calls, head.row_inputs).run(step, cache)
        else:
            InLockstep(head.calls, parts, ReferenceProgram).run(step, cache)
        outputs = head.outputs(step)
        best = outputs["logits"].topk(2).indices.numpy()
        for rank, wanted in enumerate(likeliest):
            assert (best[:, rank] == wanted[tokens]).mean() >= (1, 0.95)[rank], graph


def test_steps_are_right_as_often_as_chosen() -> None:
    recipe = {"seed": 3, "ordinary_tokens": [2, 100_000], "acceptance": ACCEPTANCE}
    right = next_tokens({**recipe, "role": "target"})
    hits = np.array([(said == right)[2:] for said in step_tokens(recipe)])
    shares = (ACCEPTANCE, ACCEPTANCE * (1 - ACCEPTANCE))
    np.testing.assert_allclose(hits.mean(1), shares, atol=0.005)
    assert not hits.all(0).any()


@pytest.mark.parametrize("form", ["dummy", "planted"])
def test_a_head_has_the_published_shape(tmp_path: Path, form: str) -> None:
    engine = planned(tmp_path / "target", "fp8", form, redrafter_num_beams=None)
    facts, width = engine.limits.draft_heads, engine.config.pretrained_config["hidden_size"]
    assert facts == {
        "recurrence": "silu",
        "num_layers": 2,
        "exit_dim": 2 * width,
        "num_beams": 5,
        "draft_len_per_beam": 5,
        "greedy_search": False,
    }
    logits = generated(engine)[engine.plan.heads[REDRAFTER_NEXT].outputs["logits"]]
    assert logits.shape == (5 * ROWS, engine.config.pretrained_config["vocab_size"])
    with pytest.raises(BadConfig, match="generate one"):
        planned(tmp_path / "target", "fp8", form, draft_model_dir="head")
