"""The bookkeeping kernels of rounds against their reference and the host's rule of acceptance."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel import compile_all
from support.round_state import UNTOUCHED, assert_same, clone, make_limits, make_step

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.device_loop import kernel, reference
from llmctl.plugins.device_loop.state import RECORD_TOKENS, RoundState
from llmctl.plugins.ops.sampling.arrays import SamplingScratch
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.accept import accept_tokens


@st.composite
def states(draw: st.DrawFn) -> tuple[RoundState, int, int]:
    """(state, requests in use, draft_len): padding anywhere, few distinct tokens so that drafts
    are often accepted, lengths at every border."""
    max_batch, max_draft_len = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    batch, draft_len = draw(st.integers(1, max_batch)), draw(st.integers(0, max_draft_len))
    state = RoundState.allocate(max_batch, max_draft_len, "cpu", slots=draw(st.integers(1, 3)))
    state.counter.fill_(draw(st.integers(0, 7)))
    state.ring.fill_(UNTOUCHED)
    for tensor in (state.root, state.previous, state.drafts, state.targets):
        values = st.lists(st.integers(-1, 2), min_size=tensor.numel(), max_size=tensor.numel())
        tensor.copy_(torch.tensor(draw(values), dtype=torch.int32).reshape(tensor.shape))
    for request in range(max_batch):
        committed = draw(st.one_of(st.just(0), st.integers(2, 96)))
        state.committed[request] = committed
        state.num_read[request] = draw(st.integers(max(committed - 3, 0), committed + 5))
        state.max_len[request] = draw(st.integers(max(committed - 1, 0), 100))
        state.capacity[request] = min(96, 8 * draw(st.integers(max(committed - 9, 0) // 8, 12)))
    return state, batch, draft_len


@settings(max_examples=150, deadline=None)
@given(states(), st.data())
def test_steps_are_described_as_the_reference_describes_them(made, data):
    state, batch, draft_len = made
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    which = data.draw(st.sampled_from(["draft_first", "draft_next", "verify"]))
    arguments: tuple[int, ...] = (batch,)
    named = {"only_chains": data.draw(st.booleans())} if which == "draft_first" else {}
    if which == "draft_next":
        arguments = (batch, data.draw(st.integers(1, state.max_draft_len)))
    elif which == "verify":
        arguments = (batch, draft_len)
    found, wanted, after = make_step(limits), make_step(limits), clone(state)
    run_launches([getattr(kernel, which)(after, found, limits, *arguments, **named)])
    getattr(reference, which)(state, wanted, limits, *arguments, **named)
    assert_same(found, wanted)
    assert_same(after, state)


@settings(max_examples=150, deadline=None)
@given(states(), st.data())
def test_drawing_and_describing_in_one_equals_the_two(made, data):
    """Logits of few values, so that many ids tie, and here and there NaN."""
    state, batch, _ = made
    limits = make_limits(state.max_batch_size, state.max_draft_len)
    index, vocab = data.draw(st.integers(1, state.max_draft_len)), data.draw(st.integers(1, 5000))
    seeded = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randint(-2, 3, (batch, vocab), generator=seeded).float()
    logits[torch.rand(logits.shape, generator=seeded) < 0.1 / vocab] = torch.nan
    scratch = SamplingScratch.allocate(batch, vocab, "cpu")
    found, wanted = clone(state), clone(state)
    found_step, wanted_step = make_step(limits), make_step(limits)
    launch = kernel.draw_next(logits, scratch, found, found_step, limits, batch, index)
    run_launches([launch])
    reference.draw_next(logits, wanted, wanted_step, limits, batch, index)
    assert_same(found, wanted)
    assert_same(found_step, wanted_step)
    assert not scratch.keys.any()


@settings(max_examples=150, deadline=None)
@given(states())
def test_accepting_equals_the_reference_and_the_hosts_rule(made):
    state, batch, draft_len = made
    found, wanted = clone(state), clone(state)
    run_launches([kernel.accept(found, batch, draft_len)])
    reference.accept(wanted, batch, draft_len)
    assert_same(found, wanted)
    record = found.ring[int(state.counter) % len(state.ring)]
    for request in range(batch):
        committed = int(state.committed[request])
        if committed == 0:
            assert not record[request].any()
            continue
        room = max(0, min(draft_len, int(state.max_len[request]) - committed - 1))
        drafts = state.drafts[request, :room].tolist()
        drawn = state.targets[request * (draft_len + 1) :][: room + 1].tolist()
        path, token = accept_tokens(Drafts(drafts), drawn)
        kept = len(path)
        emitted = [*drafts[:kept], token]
        row = record[request].tolist()
        assert row[:RECORD_TOKENS] == [committed, kept, kept + 1, room]
        assert row[RECORD_TOKENS : RECORD_TOKENS + kept + 1] == emitted
        assert not any(row[RECORD_TOKENS + kept + 1 :])
        history = [int(state.previous[request]), int(state.root[request]), *emitted]
        assert found.previous[request] == history[-2]
        assert found.root[request] == history[-1]
        assert found.committed[request] == committed + kept + 1


def test_the_ring_goes_on_when_the_counter_of_rounds_begins_anew():
    """The host counts on: round 2^31 reports in slot 2^31 % 8."""
    slots, batch, draft_len = 8, 2, 3
    around = torch.zeros((3 * slots, batch, RECORD_TOKENS + draft_len + 1), dtype=torch.int32)
    ring = around[slots : 2 * slots]
    state = RoundState.allocate(batch, draft_len, "cpu", slots=slots, ring=ring)
    state.counter[:] = 2**31 - 2
    for finished in range(2**31 - 2, 2**31 + 2):
        state.committed[:], state.max_len[:] = 5, 50
        around.fill_(77)
        run_launches([kernel.accept(state, batch, draft_len)])
        written = [i - slots for i in range(3 * slots) if (around[i] != 77).any()]
        assert written == [finished % slots]
    assert int(state.counter) == 2


def test_a_plain_batch_is_laid_out_as_the_contract_says():
    """cu_q 2b and b * (k + 1), slots through the block table, positions from committed - 1."""
    state = RoundState.allocate(3, 4, "cpu")
    for name, values in (
        ("root", [5, 6, 7]),
        ("previous", [1, 2, 3]),
        ("committed", [2, 9, 20]),
        ("max_len", [90, 90, 90]),
        ("capacity", [16, 16, 24]),
    ):
        getattr(state, name).copy_(torch.tensor(values))
    state.drafts.copy_(torch.arange(12).reshape(3, 4) + 100)
    limits = make_limits(3, 4)
    step = make_step(limits)
    run_launches([kernel.draft_first(state, step, limits, 3)])
    assert step.token_ids[:6].tolist() == [1, 5, 2, 6, 3, 7]
    assert step.position_ids[:6].tolist() == [0, 1, 7, 8, 18, 19]
    assert step.cu_q.tolist() == [0, 2, 4, 6]
    assert step.kv_len.tolist() == [2, 9, 20]
    assert step.logit_rows[:3].tolist() == [1, 3, 5]
    run_launches([kernel.draft_next(state, step, limits, 3, 2)])
    assert step.token_ids[:3].tolist() == [101, 105, 109]
    assert step.position_ids[:3].tolist() == [3, 10, 21]
    assert step.kv_len.tolist() == [4, 11, 22]
    assert step.logit_rows[:3].tolist() == [0, 1, 2]
    run_launches([kernel.verify(state, step, limits, 3, 4)])
    assert step.token_ids[10:15].tolist() == [7, 108, 109, 110, 111]
    assert step.position_ids[10:15].tolist() == [19, 20, 21, 22, 23]
    assert step.kv_len.tolist() == [6, 13, 24]
    assert step.cu_q.tolist() == [0, 5, 10, 15]
    assert step.logit_rows[:15].tolist() == list(range(15))
    table = step.block_tables[2].tolist()
    wanted = [table[p // 8] * 8 + p % 8 for p in range(19, 24)]
    assert step.slot_mapping[10:15].tolist() == wanted


@pytest.mark.parametrize("accepted", range(4))
def test_the_only_request_does_not_read_a_token_twice(accepted):
    """Of three drafts the draft engine has read two: its step has padding in place of a token that
    is in its cache, unless all were accepted."""
    state = RoundState.allocate(2, 3, "cpu")
    for name, value in (("root", 5), ("previous", 1), ("committed", 9), ("max_len", 90)):
        getattr(state, name).fill_(value)
    state.capacity.fill_(16)
    state.drafts.copy_(torch.tensor([[6, 7, 8], [6, 7, 8]]))
    state.targets[:4] = torch.tensor([6, 7, 8, 9]).where(torch.arange(4) < accepted, 9)
    limits = make_limits(2, 3)
    step = make_step(limits)
    run_launches([kernel.draft_first(state, step, limits, 1, only_chains=True)])
    assert step.token_ids[:2].tolist() == [1, 5], "nothing was read before the first round"
    run_launches([kernel.verify(state, step, limits, 1, 3), kernel.accept(state, 1, 3)])
    run_launches([kernel.draft_first(state, step, limits, 1, only_chains=True)])
    last, length = 8 + accepted + 1, 9 + accepted + 1
    slots = [step.block_tables[0].tolist()[p // 8] * 8 + p % 8 for p in (last - 1, last)]
    assert int(step.kv_len[0]) == length
    if accepted == 3:
        assert step.token_ids[:2].tolist() == [8, 9] and step.cu_q[:2].tolist() == [0, 2]
        assert step.position_ids[:2].tolist() == [last - 1, last]
        assert step.slot_mapping[:2].tolist() == slots and step.logit_rows[0] == 1
    else:
        assert step.token_ids[:2].tolist() == [9, 0] and step.cu_q[:2].tolist() == [0, 1]
        assert step.position_ids[:2].tolist() == [last, 0]
        assert step.slot_mapping[:2].tolist() == [slots[1], -1] and step.logit_rows[0] == 0
    run_launches([kernel.draft_first(state, step, limits, 2, only_chains=True)])
    assert step.cu_q[:3].tolist() == [0, 2, 4], "among others it has two"
    run_launches([kernel.draft_first(state, step, limits, 1)])
    assert step.cu_q[:2].tolist() == [0, 2], "nodes of trees are elsewhere"


def test_acceptance_replaces_numbers_that_all_threads_have_read():
    shapes = [(1, 0), (1, 10), (5, 0), (8, 10), (128, 0), (128, 1), (512, 10)]
    specs = [kernel._accept_spec(*shape) for shape in shapes]
    for spec, _, machine_code in compile_all(specs):
        order = re.findall(r" (LDG|STG|BAR)\b", machine_code)
        before = order[: order.index("STG")]
        assert "BAR" in before[len(before) - before[::-1].index("LDG") :], spec.name


@pytest.mark.parametrize(
    ("batch", "draft_len", "vocab"),
    [(1, 1, 32000), (8, 10, 128256), (64, 16, 128256), (256, 10, 151936), (256, 32, 131)],
)
def test_round_kernels_compile_without_spills(batch: int, draft_len: int, vocab: int):
    specs = kernel.kernels(batch, draft_len, vocab)
    for spec in specs:
        assert compile_kernel(spec).local_bytes == 0
    state = RoundState.allocate(batch, draft_len, "cpu")
    step, limits = make_step(make_limits(batch, draft_len)), make_limits(batch, draft_len)
    logits = torch.empty(batch, vocab, device="meta")
    scratch = SamplingScratch.allocate(batch, vocab, "meta")
    launches: list[Launch] = [
        kernel.draft_first(state, step, limits, batch),
        kernel.verify(state, step, limits, batch, draft_len),
        kernel.draw_next(logits, scratch, state, step, limits, batch, 1),
        kernel.accept(state, batch, draft_len),
    ]
    assert all(launch.spec in specs for launch in launches)
