"""Heads of a planted engine: generated with its other weights, right as often as was chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import planted
from support.planted import ACCEPTANCE

from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import (
    BASE,
    EAGLE_EXTEND,
    EAGLE_NEXT,
    MEDUSA_GRAPH,
    REDRAFTER_FIRST,
    REDRAFTER_NEXT,
    medusa_logits,
)
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.heads.medusa.tree import DEFAULT
from llmctl.builder.speculative_modes import BuildMode
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.runtime.drafting.medusa.accuracy import best_tree
from llmctl.runtime.engines.engine import kv_cache_shape, make_calls
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.engines.planted_graphs import PLANTED_GRAPHS
from llmctl.runtime.engines.planted_text import (
    head_tokens,
    next_tokens,
    second_tokens,
    tokens_per_round,
)
from llmctl.runtime.step import pack_rows

HEADS, ROWS = 3, 40


def plan(folder: Path, quantization: str | None, **options: object) -> EnginePlan:
    limits = {"max_batch_size": 1, "speculative_decoding_mode": "medusa"}
    return planted.plan(folder, quantization, **{"num_medusa_heads": HEADS, **limits, **options})


@pytest.mark.parametrize("quantization", ["fp8", "w4a8_mxfp4_fp8", None])
def test_heads_say_what_the_recipe_says(tmp_path: Path, quantization: str | None) -> None:
    """The plan for a GPU, run by the operators' references on a prompt of random tokens."""
    engine = plan(tmp_path / "target", quantization)
    assert (quantization is None) == all(op.op != "quantize" for op in heads_of(engine).ops)
    tensors = planted.generated(engine)
    spec = engine.plan.kv_cache
    cache = torch.zeros(kv_cache_shape(engine.plan, 2), dtype=getattr(torch, spec.dtype))
    recipe = engine.config.weights
    first, stop = recipe["ordinary_tokens"]
    tokens = np.random.default_rng(0).integers(first, stop, ROWS).astype(np.int32)
    step = prompt(tokens)
    ReferenceProgram(make_calls(engine.plan, tensors)).run(step, cache)
    chosen = tensors[engine.plan.logits][:ROWS].argmax(-1).numpy()
    assert np.array_equal(chosen, next_tokens(recipe)[tokens])
    (heads,) = bind_heads(engine.plan, tensors)
    found = []
    for row in range(ROWS):  # as many rows as the engine has requests
        each = pack_rows(ROWS, [row])
        ReferenceProgram(heads.calls, heads.row_inputs).run(each, cache)
        outputs = heads.outputs(each)
        found.append([outputs[medusa_logits(head)][0].topk(2).indices for head in range(HEADS)])
    for head in range(HEADS):
        for rank, wanted in enumerate(head_tokens(recipe, head)):
            said = np.array([int(row[head][rank]) for row in found])
            assert (said == wanted[tokens]).mean() >= (1, 0.95)[rank], "ranks of 4,096 in 256 signs"


def prompt(tokens: np.ndarray) -> StepInputs:
    count = np.arange(ROWS, dtype=np.int32)
    return StepInputs(
        token_ids=tokens,
        position_ids=count,
        cu_q=np.array([0, ROWS], np.int32),
        kv_len=np.array([ROWS], np.int32),
        block_tables=np.array([[0, 1]], np.int32),
        slot_mapping=count,
        logit_rows=count,
    )


def test_a_draft_has_a_second_likeliest_token(tmp_path: Path) -> None:
    """For trees: it is right as often as the likeliest, of those places where that is wrong."""
    recipe = {"seed": 3, "ordinary_tokens": [2, 100_000], "acceptance": ACCEPTANCE, "role": "draft"}
    right = next_tokens({**recipe, "role": "target"})
    hits = [(said == right)[2:] for said in (next_tokens(recipe), second_tokens(recipe))]
    shares = (ACCEPTANCE, ACCEPTANCE * (1 - ACCEPTANCE))
    np.testing.assert_allclose([own.mean() for own in hits], shares, atol=0.005)
    assert not (hits[0] & hits[1]).any()
    assert sorted(second_tokens(recipe)[2:]) == list(range(2, 100_000)), "one row for each"

    engine = planted.plan(tmp_path / "draft", "fp8", role="draft", max_batch_size=ROWS)
    tensors, spec = planted.generated(engine), engine.plan.kv_cache
    cache = torch.zeros(kv_cache_shape(engine.plan, 2), dtype=getattr(torch, spec.dtype))
    own = engine.config.weights
    tokens = np.random.default_rng(0).integers(*own["ordinary_tokens"], ROWS).astype(np.int32)
    ReferenceProgram(make_calls(engine.plan, tensors)).run(prompt(tokens), cache)
    said = tensors[engine.plan.logits][:ROWS].topk(2).indices.numpy()
    assert np.array_equal(said[:, 0], next_tokens(own)[tokens])
    assert (said[:, 1] == second_tokens(own)[tokens]).mean() >= 0.9, "of 4,096 in 256 signs"


def heads_of(engine: EnginePlan):
    return engine.plan.heads[MEDUSA_GRAPH]


def test_heads_are_right_as_often_as_chosen_and_independently() -> None:
    recipe = {"seed": 3, "ordinary_tokens": [2, 100_000], "acceptance": ACCEPTANCE}
    follows = next_tokens({**recipe, "role": "target"})
    right, is_right = follows, []
    for head in range(4):
        right = np.where(right >= 0, follows[right], -1)
        ranks = head_tokens(recipe, head)
        hits = np.array([(said == right)[2:] for said in ranks])
        shares = (ACCEPTANCE, ACCEPTANCE * (1 - ACCEPTANCE))
        np.testing.assert_allclose(hits.mean(1), shares, atol=0.005)
        assert not hits.all(0).any() and (ranks[0] != ranks[1])[2:].mean() > 0.999
        for said in ranks:
            assert sorted(said[2:]) == list(range(2, 100_000)), "one row of the weight for each"
        is_right.append(hits[0])
    assert (is_right[0] & is_right[1]).mean() == pytest.approx(ACCEPTANCE**2, abs=0.005)


def test_the_expected_tokens_of_a_round_are_those_of_a_walk_along_the_text() -> None:
    recipe = {"seed": 1, "ordinary_tokens": [0, 50_000], "acceptance": ACCEPTANCE}
    follows = next_tokens({**recipe, "role": "target"})
    ranks = [head_tokens(recipe, head) for head in range(4)]
    paths, x, rounds, tokens = set(DEFAULT), 17, 0, 0
    while tokens < 40_000:
        path: tuple[int, ...] = ()
        root = following = int(follows[x])
        for likeliest, second in ranks:
            following = int(follows[following])
            rank = 0 if likeliest[x] == following else 1 if second[x] == following else 10
            if (*path, rank) not in paths:
                break
            path = (*path, rank)
        for _ in path:
            root = int(follows[root])
        x, rounds, tokens = root, rounds + 1, tokens + 1 + len(path)
    expected = tokens_per_round(recipe, DEFAULT)
    assert tokens / rounds == pytest.approx(expected, rel=0.02)
    shares = np.array([[ACCEPTANCE, ACCEPTANCE * (1 - ACCEPTANCE)]] * 4)
    everything, promised = best_tree(shares, 30)
    assert tokens_per_round(recipe, everything.paths) == pytest.approx(promised)


def test_options_say_how_many_heads(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    assert len(heads_of(plan(folder, "fp8")).outputs) == HEADS
    engine = plan(folder, "fp8", num_medusa_heads=None)
    assert len(heads_of(engine).outputs) == 4 and engine.limits.max_draft_len == 63
    engine = plan(folder, "fp8", num_medusa_heads=None, medusa_choices="[[0,0],[1]]")
    assert len(heads_of(engine).outputs) == 2 and engine.limits.max_draft_len == 3
    with pytest.raises(BadConfig, match="generate them"):
        plan(folder, "fp8", draft_model_dir="heads")
    with pytest.raises(BadConfig, match="a path of 2 tokens; 1 heads"):
        plan(folder, "fp8", num_medusa_heads=1, medusa_choices="[[0,0]]")


def test_every_mode_with_heads_is_planted_or_says_that_it_cannot_be(tmp_path: Path) -> None:
    recurrent, attending = {REDRAFTER_FIRST, REDRAFTER_NEXT}, {EAGLE_EXTEND, EAGLE_NEXT}
    assert set(PLANTED_GRAPHS) == {BASE, MEDUSA_GRAPH} | recurrent | attending
    request = BuildRequest(speculative_decoding_mode="medusa")
    with pytest.raises(Unsupported, match="cannot be generated"):
        BuildMode(64).invent(request, None)
