"""A level of drafts as a step: what its tokens attend to, by the reference and by Triton's kernel,
is what each path alone would have."""

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
from llmctl.runtime.drafting.growth.levels import pack_level
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
def test_a_level_attends_as_its_paths_alone_do(levels, seed):
    generator = np.random.default_rng([levels, seed])
    growths = [own for own in grown(generator, levels) if own.frontier]
    roots = np.array([len(own.sequence.tokens) - 1 for own in growths], np.int32)
    num_blocks = 20
    tables = generator.permutation(num_blocks * len(growths)).astype(np.int32)
    tables = np.ascontiguousarray(tables.reshape(len(growths), num_blocks))
    step = pack_level(growths, roots, tables, BLOCK)
    assert np.diff(step.cu_q).tolist() == [len(own.frontier) for own in growths]
    assert step.logit_rows.tolist() == list(range(step.num_tokens))

    shape = (1, num_blocks * len(growths), 2, KV_HEADS, BLOCK, SIZE)
    cache = torch.from_numpy(generator.standard_normal(shape, np.float32)).to(torch.bfloat16)
    query = torch.from_numpy(
        generator.standard_normal((step.num_tokens, HEADS * SIZE), np.float32)
    ).to(torch.bfloat16)
    found = torch.empty_like(query)
    reference({"q": query}, {"out": found}, ATTRIBUTES, step, cache)
    row = 0
    for index, own in enumerate(growths):
        for leaf, path in zip(own.frontier, own.paths(), strict=True):
            assert step.token_ids[row] == leaf.token
            places = [*range(roots[index] + 1), *(roots[index] + place for place in path)]
            blocks, offsets = np.divmod(places, BLOCK)
            slots = tables[index][blocks] * BLOCK + offsets
            assert step.slot_mapping[row] == slots[-1]
            assert step.position_ids[row] == len(slots) - 1
            wanted = attended_alone(query[row : row + 1], cache, slots)
            torch.testing.assert_close(found[row : row + 1].float(), wanted, rtol=1e-2, atol=1e-2)
            row += 1
    if seed == 0:
        by_triton = attended(step, query, cache)
        torch.testing.assert_close(by_triton.float(), found.float(), rtol=1e-2, atol=1e-2)


def attended_alone(query, cache, slots):
    """One token's attention to the keys in these slots, in torch."""
    blocks, offsets = np.divmod(slots, BLOCK)
    keys, values = (cache[0, blocks, which][:, :, :][np.arange(len(slots)), :, offsets]
                    for which in range(2))  # fmt: skip
    group = HEADS // KV_HEADS
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    heads = query.float().view(HEADS, SIZE)
    weights = (torch.einsum("hd,nhd->hn", heads, keys) * SIZE**-0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values).reshape(1, -1)


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
