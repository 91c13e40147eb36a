"""The bookkeeping kernels of trees against their reference, the host's rule and its packing."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel import compile_all
from support.round_state import UNTOUCHED, assert_same, clone, make_limits, make_step

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.device_loop import kernel as chains
from llmctl.plugins.device_loop import tree_kernel as kernel
from llmctl.plugins.device_loop import tree_reference as reference
from llmctl.plugins.device_loop.state import RECORD_TOKENS, RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.accept import accept_tokens
from llmctl.runtime.generate.commit import commit
from llmctl.runtime.request import Request, Sequence
from llmctl.runtime.step import Span, pack, slots_of

Made = tuple[RoundState, DraftTrees, int, int]


@st.composite
def states(draw: st.DrawFn) -> Made:
    """(state, trees, requests in use, draft_len): any trees, padding anywhere, few distinct tokens,
    so that drafts are often accepted, and lengths at every border."""
    max_batch, max_draft_len = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    batch, draft_len = draw(st.integers(1, max_batch)), draw(st.integers(0, max_draft_len))
    state = RoundState.allocate(max_batch, max_draft_len, "cpu", slots=draw(st.integers(1, 3)))
    trees = DraftTrees.allocate(max_batch, max_draft_len, "cpu")
    state.counter.fill_(draw(st.integers(0, 7)))
    state.ring.fill_(UNTOUCHED)
    seeded = np.random.default_rng(draw(st.integers(0, 10**6)))
    for tensor in (state.root, state.previous, state.drafts, state.targets):
        tensor.copy_(torch.from_numpy(seeded.integers(0, 3, tuple(tensor.shape))))
    is_deep = draw(st.booleans())
    for request in range(max_batch):
        least = [max(0, i - 2) if is_deep else 0 for i in range(max_draft_len)]
        parents = [seeded.integers(low, i + 1) for i, low in enumerate(least)]
        trees.parents[request] = torch.tensor(np.array(parents))
        trees.counts[request] = draw(st.integers(0, max_draft_len))
        committed = draw(st.one_of(st.just(0), st.integers(2, 96)))
        state.committed[request] = committed
        state.max_len[request] = draw(st.integers(max(committed - 1, 0), 100))
        state.capacity[request] = min(96, 8 * draw(st.integers(max(committed - 9, 0) // 8, 12)))
    for tensor in (trees.rows, trees.positions, trees.starts, trees.moves):
        tensor.fill_(UNTOUCHED)
    return state, trees, batch, draft_len


def live_drafts(state: RoundState, trees: DraftTrees, request: int, draft_len: int) -> int:
    committed = int(state.committed[request])
    room = min(int(state.max_len[request]) - 1, int(state.capacity[request])) - committed
    return max(0, min(draft_len, int(trees.counts[request]), room))


@settings(max_examples=120, deadline=None)
@given(states())
def test_steps_are_described_as_the_reference_describes_them(made: Made) -> None:
    state, trees, batch, draft_len = made
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    found, wanted = make_step(limits), make_step(limits)
    found_trees, wanted_trees = clone(trees), clone(trees)
    run_launches([kernel.verify_tree(state, found_trees, found, limits, batch, draft_len)])
    reference.verify_tree(state, wanted_trees, wanted, limits, batch, draft_len)
    assert_same(found, wanted)
    assert_same(found_trees, wanted_trees)


@settings(max_examples=60, deadline=None)
@given(states())
def test_a_step_is_what_the_host_would_have_packed(made: Made) -> None:
    """Requests without padding between them, whose blocks hold their roots."""
    state, trees, batch, draft_len = made
    state.committed.clamp_(min=2, max=90)
    state.max_len.clamp_(min=91)
    state.capacity.fill_(96)
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    step = make_step(limits)
    run_launches([kernel.verify_tree(state, trees, step, limits, batch, draft_len)])
    spans = []
    for request in range(batch):
        committed = int(state.committed[request])
        count = live_drafts(state, trees, request, draft_len)
        tokens = [*range(committed - 1), int(state.root[request])]
        sequence = Sequence(request, request, Request((1,), 1), 0, tokens, 1, 100)
        sequence.block_table = step.block_tables[request].tolist()
        drafts = state.drafts[request, :count].tolist()
        parents = [int(node) - 1 for node in trees.parents[request, :count]]
        spans.append(Span(sequence, committed - 1, committed, drafts, parents=parents))
    wanted = pack(spans, limits.tokens_per_block)
    total = wanted.num_tokens
    for name in ("token_ids", "position_ids", "slot_mapping", "cu_q", "kv_len"):
        array = getattr(wanted, name)
        assert getattr(step, name)[: len(array)].tolist() == array.tolist(), name
    assert step.slot_mapping[total : batch * (draft_len + 1)].eq(-1).all()
    rows = [
        request * (draft_len + 1) + node
        for request, span in enumerate(spans)
        for node in range(span.num_rows)
    ]
    assert step.logit_rows[rows].tolist() == wanted.logit_rows.tolist()
    assert trees.positions[rows].tolist() == (wanted.position_ids + 1).tolist()
    if wanted.trees is None:
        assert step.tree_start[:batch].eq(-1).all()
        return
    for request, span in enumerate(spans):
        start, own = int(wanted.trees.start[request]), int(step.tree_start[request])
        assert (start < 0) == (own < 0)
        for node in range(span.num_rows if start >= 0 else 0):
            depth = int(wanted.position_ids[wanted.cu_q[request] + node]) - span.start
            path = wanted.trees.paths[start + node, : depth + 1]
            assert step.paths[own + node, : depth + 1].tolist() == path.tolist()


@settings(max_examples=150, deadline=None)
@given(states())
def test_accepting_equals_the_reference_and_the_hosts_rule(made: Made) -> None:
    state, trees, batch, draft_len = made
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    step = make_step(limits)
    found, wanted, found_trees, wanted_trees = (
        clone(owner) for owner in (state, state, trees, trees)
    )
    run_launches([kernel.accept_tree(found, found_trees, step, limits, batch, draft_len)])
    reference.accept_tree(wanted, wanted_trees, step, limits, batch, draft_len)
    assert_same(found, wanted)
    assert_same(found_trees, wanted_trees)
    record = found.ring[int(state.counter) % len(state.ring)]
    for request in range(batch):
        committed = int(state.committed[request])
        if committed == 0:
            assert not record[request].any()
            continue
        count = live_drafts(state, trees, request, draft_len)
        drafts = Drafts(
            _distinct(state, trees, request, count),
            [int(node) - 1 for node in trees.parents[request, :count]],
        )
        drawn = state.targets[request * (draft_len + 1) :][: count + 1].tolist()
        path, token = accept_tokens(drafts, drawn)
        tokens = [0] * (committed - 1) + [int(state.root[request])]
        max_len = max(int(state.max_len[request]), committed + 1)
        sequence = Sequence(request, request, Request((1,), 99), 0, tokens, 1, max_len)
        done = commit(sequence, [*(drafts.tokens[i] for i in path), token], path, count)
        row = record[request].tolist()
        assert row[0] == committed and row[2] == done.num_tokens and row[3] == count
        assert row[RECORD_TOKENS : RECORD_TOKENS + row[2]] == sequence.tokens[committed:]
        assert not any(row[RECORD_TOKENS + row[2] :])
        assert found.committed[request] == len(sequence.tokens)
        history = [int(state.previous[request]), *sequence.tokens[committed - 1 :]]
        assert [found.previous[request], found.root[request]] == history[-2:]
        last = (0, *(1 + i for i in path))[done.num_tokens - 1]
        assert row[1] == last
        assert found_trees.rows[request] == request * (draft_len + 1) + last
        moves = found_trees.moves[found_trees.starts[request] : found_trees.starts[request + 1]]
        table = step.block_tables[request].tolist()
        assert [tuple(move) for move in moves.tolist()] == slots_of(table, done.moves, 8)


def _distinct(state: RoundState, trees: DraftTrees, request: int, count: int) -> list[int]:
    """Tokens of the drafts; a later sibling of one token gets one that is never drawn."""
    seen: set[tuple[int, int]] = set()
    tokens = []
    for i in range(count):
        own = (int(trees.parents[request, i]), int(state.drafts[request, i]))
        tokens.append(-9 - i if own in seen else own[1])
        seen.add(own)
    return tokens


@settings(max_examples=40, deadline=None)
@given(states())
def test_a_tree_that_is_a_chain_is_accepted_as_one(made: Made) -> None:
    state, _, batch, draft_len = made
    state.capacity.fill_(200)
    trees = DraftTrees.allocate(state.max_batch_size, state.max_draft_len, "cpu")
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    found, wanted = clone(state), clone(state)
    step = make_step(limits)
    run_launches([kernel.accept_tree(found, trees, step, limits, batch, draft_len)])
    run_launches([chains.accept(wanted, batch, draft_len)])
    assert_same(found, wanted)
    assert not trees.starts.any(), "nothing has to move"


def test_rows_draw_as_their_requests_do() -> None:
    state, trees = RoundState.allocate(5, 3, "cpu"), DraftTrees.allocate(5, 3, "cpu")
    for index, name in enumerate(state.sampling.__slots__):
        getattr(state.sampling, name).copy_(torch.arange(5) + 10 * index)
    wanted = clone(trees)
    wanted = replace(wanted, sampling=clone(trees.sampling))
    run_launches([kernel.spread(state, trees, 4, 2)])
    reference.spread(state, wanted, 4, 2)
    for field in fields(state.sampling):
        found = getattr(trees.sampling, field.name)
        assert torch.equal(found, getattr(wanted.sampling, field.name)), field.name
    assert trees.sampling.top_k[:12].tolist() == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_trees_are_filled_with_the_likeliest_tokens(data: st.DataObject) -> None:
    """Logits of few values, so that many ids tie, here and there NaN and infinities; torch's own
    order where none of them tie."""
    batch, max_draft_len = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    draft_len = data.draw(st.integers(1, max_draft_len))
    num_heads, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 10))
    vocab = data.draw(st.sampled_from([10, 131, 2048, 2049, 5000]))
    ties = data.draw(st.booleans())
    seeded = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = [torch.randn(batch + 1, vocab, generator=seeded) for _ in range(num_heads)]
    if ties:
        logits = [head.round() for head in logits]
        for head in logits:
            head[torch.rand(head.shape, generator=seeded) < 1 / vocab] = torch.nan
            head[torch.rand(head.shape, generator=seeded) < 1 / vocab] = -torch.inf
            head[torch.rand(head.shape, generator=seeded) < 1 / vocab] = torch.inf
    heads = torch.randint(num_heads, (max_draft_len,), generator=seeded, dtype=torch.int32)
    ranks = torch.randint(count, (max_draft_len,), generator=seeded, dtype=torch.int32)
    found, wanted = (RoundState.allocate(batch, max_draft_len, "cpu") for _ in range(2))
    keys = torch.full(
        (num_heads, kernel.num_keys(batch, kernel.num_chunks(vocab), count)), UNTOUCHED
    )
    nodes = kernel.StaticNodes(heads, ranks)
    launches = [
        kernel.list_top(kernel.HeadLogits.of(logits), keys, batch, count),
        kernel.fill_tree(keys, nodes, found, batch, draft_len, count, vocab),
    ]
    run_launches(launches)
    reference.fill_tree(logits, heads, ranks, wanted, batch, draft_len)
    if not ties:
        for draft in range(draft_len):
            top = logits[heads[draft]][:batch].topk(count).indices[:, ranks[draft]]
            assert wanted.drafts[:, draft].tolist() == top.tolist()
    assert torch.equal(found.drafts, wanted.drafts)


def test_acceptance_replaces_numbers_that_all_threads_have_read() -> None:
    shapes = [(1, 1), (1, 63), (8, 21), (64, 63), (256, 10)]
    specs = [kernel._accept_spec(*shape) for shape in shapes]
    for spec, _, machine_code in compile_all(specs):
        order = re.findall(r" (LDG|STG|BAR)\b", machine_code)
        before = order[: order.index("STG")]
        assert "BAR" in before[len(before) - before[::-1].index("LDG") :], spec.name


@pytest.mark.parametrize(
    ("batch", "draft_len", "vocab"),
    [(1, 1, 32000), (8, 21, 128256), (64, 63, 128256), (256, 10, 151936), (16, 255, 4096)],
)
def test_tree_kernels_compile_without_spills(batch: int, draft_len: int, vocab: int) -> None:
    specs = kernel.tree_kernels(batch, draft_len, vocab)
    for spec in specs:
        assert compile_kernel(spec).local_bytes == 0, spec.name
    state = RoundState.allocate(batch, draft_len, "cpu")
    trees = DraftTrees.allocate(batch, draft_len, "cpu")
    limits = make_limits(batch, draft_len)
    step = make_step(limits)
    keys = torch.empty(2, 8, device="meta")
    logits = kernel.HeadLogits((torch.empty(batch, vocab, device="meta"),) * 2, keys[:, 0])
    nodes = kernel.StaticNodes(trees.parents[0], trees.parents[0])
    launches = [
        kernel.list_top(logits, keys, batch, 10),
        kernel.fill_tree(keys, nodes, state, batch, draft_len, 10, vocab),
        kernel.verify_tree(state, trees, step, limits, batch, draft_len),
        kernel.spread(state, trees, batch, draft_len),
        kernel.accept_tree(state, trees, step, limits, batch, draft_len),
    ]
    assert [launch.spec for launch in launches] == specs
    for launch in launches:
        assert len(launch.arguments) == len(launch.spec.arguments)
