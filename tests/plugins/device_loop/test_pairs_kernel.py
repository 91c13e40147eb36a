"""The kernels that describe what a head reads after a round: against their references, and by what
a pair is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.round_state import assert_same, clone, make_limits, make_step, random_trees

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.device_loop import pairs_kernel, pairs_reference, reference, tree_reference
from llmctl.plugins.device_loop.state import RoundState


def verified(seed: int, max_batch: int, batch: int, draft_len: int):
    """(the state after acceptance, the step of the verification, limits): some of it padding,
    drafts that are often accepted, and some positions that have no block."""
    chance = np.random.default_rng(seed)
    most = draft_len + int(chance.integers(0, 3))
    state, limits = RoundState.allocate(max_batch, most, "cpu"), make_limits(max_batch, most, 512)
    for tensor in (state.root, state.previous, state.drafts, state.targets):
        tensor.copy_(torch.from_numpy(chance.integers(0, 2, tuple(tensor.shape))))
    for request in range(max_batch):
        committed = int(chance.integers(2, 480)) * int(chance.random() < 0.8)
        state.committed[request] = committed
        state.max_len[request] = committed + int(chance.integers(1, 9))
        state.capacity[request] = -(-committed // 8) * 8
    step = make_step(limits)
    reference.verify(state, step, limits, batch, draft_len)
    before = clone(state)
    reference.accept(state, batch, draft_len)
    return before, state, step, limits


@pytest.mark.parametrize("seed", range(40))
def test_a_step_of_pairs_is_described_as_the_reference_describes_it(seed: int) -> None:
    chance = np.random.default_rng(seed)
    max_batch, draft_len = int(chance.integers(1, 10)), int(chance.integers(0, 6))
    batch = int(chance.integers(1, max_batch + 1))
    before, state, step, limits = verified(seed, max_batch, batch, draft_len)
    found, wanted = make_step(limits), make_step(limits)
    pairs = [replace(state, committed=torch.full_like(state.committed, 9)) for _ in range(2)]
    run_launches([pairs_kernel.read_pairs(state, pairs[0], step, found, batch, draft_len)])
    pairs_reference.read_pairs(state, pairs[1], step, wanted, batch, draft_len)
    assert_same(found, wanted)
    assert torch.equal(pairs[0].committed, pairs[1].committed)

    count = draft_len + 1
    for request in range(batch):
        committed = int(state.committed[request])
        assert pairs[0].committed[request] == max(committed - 1, 0)
        if not committed:
            assert found.kv_len[request] == 0
            continue
        # From the root of the round on, each position with the token behind it.
        last, old = int(found.logit_rows[request]), int(before.committed[request])
        first = last - (committed - 1 - old)
        assert first % count == 0 and found.cu_q[request + 1] == first + count
        positions = found.position_ids[first : last + 1].tolist()
        assert positions == list(range(old - 1, committed - 1))
        emitted = [*before.drafts[request, : committed - 1 - old], state.root[request]]
        assert found.token_ids[first : last + 1].tolist() == [int(token) for token in emitted]
        table = step.block_tables[request].tolist()
        for index, position in enumerate(positions, first):
            has_block = position < int(state.capacity[request])
            slot = table[position // 8] * 8 + position % 8 if has_block else -1
            assert found.slot_mapping[index] == slot


@pytest.mark.parametrize("seed", range(40))
def test_a_step_of_an_accepted_path_is_described_as_the_reference_describes_it(seed: int) -> None:
    """Of any trees; and a pair is a position's row of the verification, and the token behind it."""
    chance = np.random.default_rng(seed)
    max_batch, draft_len = int(chance.integers(1, 10)), int(chance.integers(1, 12))
    batch = int(chance.integers(1, max_batch + 1))
    state, trees, limits = random_trees(max_batch, draft_len, seed)
    verified, before = make_step(limits), clone(state)
    tree_reference.verify_tree(state, trees, verified, limits, batch, draft_len)
    tree_reference.accept_tree(state, trees, verified, limits, batch, draft_len)
    grown = (state.committed - before.committed)[:batch]
    depth = max(int(grown.max()) - 1, 0) + int(chance.integers(0, 2))
    found, wanted = make_step(limits), make_step(limits)
    pairs = [replace(state, committed=torch.full_like(state.committed, 9)) for _ in range(2)]
    sources = [torch.full((max_batch * (draft_len + 2),), -7, dtype=torch.int32) for _ in range(2)]
    sizes = batch, draft_len, depth
    read = state, pairs[0], trees, verified, found, limits, sources[0], *sizes
    run_launches([pairs_kernel.read_path(*read)])
    reads = state, pairs[1], trees, verified, wanted, limits, sources[1], *sizes
    pairs_reference.read_path(*reads)
    assert_same(found, wanted)
    assert torch.equal(pairs[0].committed, pairs[1].committed)
    assert torch.equal(sources[0], sources[1])

    for request in range(batch):
        first, end = found.cu_q[request : request + 2].tolist()
        assert end - first == grown[request]
        if first == end:
            continue
        old, emitted = int(before.committed[request]), int(grown[request])
        assert found.position_ids[first:end].tolist() == list(range(old - 1, old - 1 + emitted))
        assert int(found.logit_rows[request]) == end - 1
        rows = sources[0][first:end]
        positions = verified.position_ids[rows]
        assert torch.equal(positions, found.position_ids[first:end])
        tokens = [int(before.root[request]), *found.token_ids[first : end - 1].tolist()]
        assert verified.token_ids[rows].tolist() == tokens
        assert int(found.token_ids[end - 1]) == int(state.root[request])


@pytest.mark.parametrize(("batch", "draft_len"), [(1, 1), (8, 5), (64, 16), (256, 32)])
def test_the_kernels_compile_without_spills(batch: int, draft_len: int) -> None:
    assert compile_kernel(pairs_kernel.read_pairs_spec(batch, draft_len)).local_bytes == 0
    assert compile_kernel(pairs_kernel.read_path_spec(batch)).local_bytes == 0
