"""A level of drafts as a step of new tokens alone, and as one that has all places of its trees: the
same attention for the drafts of the level, by the operator's reference and by Triton's kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.kernel import step_arrays

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, LaunchEnv, StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.runtime.drafting.growth.growth import Chain, DynamicShape, DynamicTree
from llmctl.runtime.drafting.growth.levels import pack_level, rows_of
from llmctl.runtime.engines.graphs import shape_of

BLOCK, HEADS, KV_HEADS, SIZE = 8, 4, 2, 64
SHAPE = DynamicShape(num_offers=4, width=3, depth=6)
ROOM = 12
ATTRIBUTES = {
    "layer": 0, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "window": 0,
    "softmax_scale": SIZE**-0.5,
}  # fmt: skip


def grown(generator, levels):
    """Growths of sequences of many lengths, some of them chains, after so many levels."""
    made = []
    for index, length in enumerate((5, 17, 64, 131)):
        request = SimpleNamespace(end_id=None)
        sequence = SimpleNamespace(tokens=list(range(length)), request=request)
        own = (
            Chain(sequence, 0, ROOM, is_plain=True)
            if index == 2
            else DynamicTree(sequence, 0, ROOM, SHAPE)
        )
        for _ in range(levels):
            count = max(1, len(own.frontier))
            offers = max(1, own.num_offers)
            tokens = [generator.permutation(99)[:offers].tolist() for _ in range(count)]
            scores = -np.sort(generator.exponential(0.7, (count, offers)))
            own.take(tokens, scores.tolist())
        made.append(own)
    return made


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_both_forms_of_a_step_attend_alike(levels, seed):
    generator = np.random.default_rng([levels, seed])
    growths = [own for own in grown(generator, levels) if own.frontier]
    roots = np.array([len(own.sequence.tokens) - 1 for own in growths], np.int32)
    num_blocks = 20
    tables = generator.permutation(num_blocks * len(growths)).astype(np.int32)
    tables = np.ascontiguousarray(tables.reshape(len(growths), num_blocks))
    steps = [pack_level(growths, roots, tables, BLOCK, takes_roots=form) for form in (True, False)]
    counts = [len(own.frontier) for own in growths]
    assert np.diff(steps[0].cu_q).tolist() == counts
    assert np.diff(steps[1].cu_q).tolist() == [rows_of(own, takes_roots=False) for own in growths]
    assert max(np.diff(steps[1].cu_q)) <= ROOM and steps[1].trees.roots is None
    rows = steps[1].logit_rows
    for name in ("token_ids", "position_ids", "slot_mapping"):
        assert np.array_equal(getattr(steps[1], name)[rows], getattr(steps[0], name)), name
    others = np.setdiff1d(np.arange(steps[1].num_tokens), rows)
    assert (steps[1].slot_mapping[others] == -1).all(), "what is there is not written again"

    shape = (1, num_blocks * len(growths), 2, KV_HEADS, BLOCK, SIZE)
    cache = torch.from_numpy(generator.standard_normal(shape, np.float32)).to(torch.bfloat16)
    query = torch.from_numpy(
        generator.standard_normal((steps[0].num_tokens, HEADS * SIZE), np.float32)
    ).to(torch.bfloat16)
    wanted = torch.empty_like(query)
    reference({"q": query}, {"out": wanted}, ATTRIBUTES, steps[0], cache)
    wide = torch.zeros((steps[1].num_tokens, HEADS * SIZE), dtype=torch.bfloat16)
    wide[rows] = query
    found = torch.empty_like(wide)
    reference({"q": wide}, {"out": found}, ATTRIBUTES, steps[1], cache)
    assert torch.equal(found[rows], wanted)
    if seed == 0:
        by_triton = attended(steps[1], wide, cache)[rows]
        torch.testing.assert_close(by_triton.float(), wanted.float(), rtol=1e-2, atol=1e-2)


def attended(step, query, cache):
    """By Triton's kernel for trees, in its interpreter."""
    limits = StepLimits(
        max_num_tokens=64, max_num_rows=64, max_batch_size=4, max_seq_len=160,
        max_draft_len=ROOM + 3, tokens_per_block=BLOCK, kv_dtype="bfloat16",
    )  # fmt: skip
    arrays = {name: torch.from_numpy(numbers) for name, numbers in step_arrays(step).items()}
    kept = {}

    def scratch(name, shape, dtype):
        return kept.setdefault(name, torch.zeros(shape, dtype=dtype))

    env = LaunchEnv(DeviceStep(**arrays), cache, limits, "tokens", scratch, use_pdl=False)
    out = torch.empty_like(query)
    call = OpCall("paged_attention", "attention", {"q": query}, {"out": out}, ATTRIBUTES)
    with np.errstate(all="ignore"):  # rows of padding
        run_launches(kernel.launches(call, env, shape_of(step)))
    return out
