"""Lookahead decoding beside a fake engine: every tree as a Jacobi iteration has it, exact text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.fake_engine import FakeEngine, plain_answer
from support.fake_loop import Harness
from support.head_schedules import (
    drafts_after_a_missed_step,
    go_on_after_a_step_that_failed,
    prompts,
    run_any_schedule,
)
from support.lookahead_oracle import Oracle

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.ops.sampling.reference import sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.request import Request, SamplingConfig

VOCAB = 23
SIZES = [(4, 3, 4), (5, 4, 2), (1, 3, 2), (3, 2, 3), (2, 2, 0), (6, 5, 6), (1, 2, 3), (3, 5, 0)]
SAMPLED = SamplingConfig(temperature=0.8, top_k=0, seed=7)


class Recorded(LookaheadDrafter):
    """Keeps what it proposed, by committed tokens."""

    def __init__(self, config: LookaheadDecodingConfig, max_draft_len: int = 1024) -> None:
        super().__init__(config, max_draft_len)
        self.proposed: list[tuple[int, int, Drafts]] = []  # sequence, its tokens, drafts

    def propose(self, batch):
        drafts = super().propose(batch)
        for item, own in zip(batch.generation, drafts, strict=True):
            sequence = item.sequence
            self.proposed.append((sequence.sequence_id, len(sequence.tokens), own))
        return drafts


def make(sizes=(4, 3, 4), draft_len=1024, **options):
    """An engine whose text soon repeats itself where whole_context is 0."""
    config = LookaheadDecodingConfig(*sizes)
    room = {"max_seq_len": 400, "max_num_tokens": 200, "max_draft_len": 64, "whole_context": 0.0}
    engine = FakeEngine(vocab_size=VOCAB, **(room | options))
    return engine, Recorded(config, draft_len)


def own_token(engine: FakeEngine, params: SamplingConfig):
    def draw(tokens):
        counts = np.bincount(tokens, minlength=VOCAB).astype(np.int32)
        row = SamplingRow(params, params.seed, len(tokens), counts, ())
        return int(sample_rows(engine.logits(np.array(tokens))[None], [row])[0])

    return draw


def paths_of(drafts: Drafts) -> set[tuple[int, ...]]:
    return {tuple(drafts.tokens_to(index)) for index in range(len(drafts.tokens))}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("whole_context", [0.0, 3.0])
@pytest.mark.parametrize("params", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_every_tree_is_that_of_a_jacobi_iteration(sizes, whole_context, params):
    generator = np.random.default_rng(sum(sizes))
    for length, end_id in ((1, None), (70, 5)):
        engine, drafter = make(sizes, whole_context=whole_context)
        harness = Harness(engine, drafter)
        prompt = tuple(generator.integers(0, VOCAB, length).tolist())
        request = Request(prompt, max_tokens=140, sampling_config=params, end_id=end_id)
        sequence = harness.add(request)
        commits = []
        while harness.scheduler.has_work:
            report = harness.step()
            commits += report.commits[len(report.batch.context) :]
        assert sequence.tokens[length:] == plain_answer(engine, request)[0]
        oracle = Oracle(own_token(engine, params), prompt, sizes, end_id)
        most = LookaheadDecodingConfig(*sizes).max_draft_len
        num_whole = 0
        wanted = oracle.rounds(length + 140)
        for (_, committed, drafts), commit, one in zip(
            drafter.proposed, commits, wanted, strict=False
        ):
            if length + 140 - committed - 1 < most:
                break  # the trees at the end of a sequence have less room
            assert committed == one.num_committed
            assert paths_of(drafts) == one.paths
            assert len(drafts.tokens) == len(one.paths) <= most, "siblings have distinct tokens"
            assert commit.accepted == one.accepted
            num_whole += 1
        assert num_whole > 20 or end_id is not None


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps():
    engine, drafter = make()
    harness = Harness(engine, drafter)
    harness.add(Request((1, 2, 3), max_tokens=300))
    harness.run()
    stats = harness.loop.stats
    assert 1 + stats.accepted_tokens / stats.rounds > 2.5


@pytest.mark.parametrize("schedule", range(8))
@pytest.mark.parametrize("whole_context", [0.0, 3.0])
def test_any_schedule_gives_the_plain_answer(schedule, whole_context):
    """Chunks, pauses, cancels, reuse, own draft lengths, greedy and sampled requests."""
    generator = np.random.default_rng([schedule, int(whole_context)])
    engine, drafter = make(
        SIZES[schedule],
        draft_len=int(generator.integers(4, 40)),
        max_seq_len=96,
        max_num_tokens=int(generator.choice([10, 17, 48])),
        max_batch_size=int(generator.choice([2, 8])),
        whole_context=whole_context,
    )
    run_any_schedule(generator, engine, drafter, reuse=schedule % 2 == 0, vocab=VOCAB)
    drafted = [drafts for _, _, drafts in drafter.proposed if drafts.tokens]
    assert len(drafted) > 20


def test_where_there_is_room_for_fewer_drafts_the_last_ones_are_left_out():
    whole = trees(Request((1, 2, 3, 1, 2, 3), max_tokens=60))
    for room in (1, 2, 5, 9):
        cut = trees(Request((1, 2, 3, 1, 2, 3), max_tokens=60, max_draft_len=room))
        assert max(len(drafts.tokens) for drafts in cut.values()) == room
        first = min(cut)
        assert cut[first].tokens == whole[first].tokens[:room]
    none = trees(Request((1, 2, 3), max_tokens=60, max_draft_len=0))
    assert not any(drafts.tokens for drafts in none.values())


def trees(request: Request) -> dict[int, Drafts]:
    """By committed tokens, of one request alone."""
    engine, drafter = make()
    harness = Harness(engine, drafter)
    harness.add(request)
    harness.run()
    return {committed: drafts for _, committed, drafts in drafter.proposed}


def test_a_request_may_have_a_smaller_window():
    """Beside others, and with the trees that an executor of that size gives it."""
    small = LookaheadDecodingConfig(2, 3, 1)
    request = Request((1, 2, 3, 4), max_tokens=80)
    engine, drafter = make((5, 4, 4))
    harness = Harness(engine, drafter)
    harness.add(request)
    own = harness.add(replace(request, lookahead_config=small))
    none = harness.add(replace(request, lookahead_config=LookaheadDecodingConfig(1, 1, 0)))
    harness.run()
    engine, alone = make(small.sizes)
    harness = Harness(engine, alone)
    harness.add(request)
    harness.run()
    found = [(n, drafts) for owner, n, drafts in drafter.proposed if owner == own.sequence_id]
    assert found == [(n, drafts) for _, n, drafts in alone.proposed]
    assert not any(d.tokens for owner, _, d in drafter.proposed if owner == none.sequence_id)
    assert (
        own.tokens == none.tokens == harness.add(request).tokens + plain_answer(engine, request)[0]
    )


def test_requests_that_ask_for_what_is_not_there_are_refused():
    request = Request((1,), max_tokens=1, lookahead_config=LookaheadDecodingConfig(4, 3, 5))
    _, drafter = make((4, 3, 4))
    with pytest.raises(BadConfig, match=r"is \[4,3,5\]; the executor's is \[4,3,4\]"):
        drafter.check(request)
    drafter.check(replace(request, lookahead_config=LookaheadDecodingConfig(3, 3, 4)))
    for other in (NoDrafter(), NgramDrafter(4)):
        with pytest.raises(Unsupported, match="the executor drafts otherwise"):
            other.check(request)
        other.check(Request((1,), max_tokens=1))


def test_a_request_that_missed_a_step_goes_on_with_its_window():
    engine, drafter = make()
    first, second = drafts_after_a_missed_step(engine, drafter)
    assert all(count >= 3 for count in (*first.values(), *second.values()))


def test_steps_without_drafts_move_the_window_on():
    """What was guessed for a position stays there, whoever wrote the tokens before it."""
    engine, drafter = make((6, 3, 0), max_num_tokens=60)
    harness = Harness(engine, drafter)
    sequence = harness.add(Request((1, 2, 3), max_tokens=40))
    for _ in range(6):
        harness.step()
    window = drafter._states[sequence.sequence_id].window
    before = [list(level) for level in window.levels]
    moved = 2
    window.follow(window.position + moved)
    for level, old in zip(window.levels, before, strict=True):
        assert level[: 6 - moved] == old[moved:] and len(level) == 6
    window.follow(window.position + 100)
    assert {len(level) for level in window.levels} == {6}


def test_after_a_step_that_failed_the_others_go_on():
    engine, drafter = make()
    go_on_after_a_step_that_failed(engine, drafter, VOCAB)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 0), (1, 4, 0)], ids=str)
def test_a_chain_is_drafted_as_one(sizes):
    """Its steps need no tree of the engine."""
    engine, drafter = make(sizes)
    engine.takes_trees = False
    harness = Harness(engine, drafter)
    for prompt in prompts(np.random.default_rng(1), 3, VOCAB):
        harness.add(Request(prompt, max_tokens=60))
    if sizes == (1, 2, 1):
        drafter.max_draft_len = 1
    harness.run()
    assert harness.loop.stats.accepted_tokens > 0


def test_no_drafts_a_round_are_refused():
    with pytest.raises(BadConfig, match="max_draft_len is 0"):
        LookaheadDrafter(LookaheadDecodingConfig(), 0)
