"""The draft engine's side of a round: what it is fed, what stays valid, when it stops."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.errors import BadConfig, PairMismatch
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import Request, SamplingConfig

PROMPT = (3, 1, 4, 1, 5)


def pair(fake, draft_len: int, agreement: float = 1.0, num_blocks: int = 200, **draft_size):
    draft = fake.Engine(agreement=agreement, **draft_size)
    drafter = DraftEngineDrafter(draft, draft_len)
    return fake.Harness(fake.Engine(), drafter, draft=draft, num_blocks=num_blocks), draft


@pytest.mark.parametrize("draft_len", [1, 2, 4, 7])
def test_a_perfect_draft_is_accepted_whole_in_every_round(fake, draft_len):
    harness, draft = pair(fake, draft_len)
    sequence = harness.add(Request(PROMPT, 60))
    while harness.scheduler.has_work:
        for commit in harness.step().commits:
            assert commit.accepted == commit.num_drafts
    assert sequence.tokens[5:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert harness.loop.stats.acceptance_rate == 1.0


def test_after_a_full_acceptance_the_draft_is_fed_two_tokens(fake):
    harness, draft = pair(fake, 3)
    harness.add(Request(PROMPT, 40))
    harness.step()  # context
    for first_feed in (1, 2, 2, 2):
        draft.num_tokens.clear()
        harness.step()
        assert draft.num_tokens == [first_feed, 1, 1]


def test_a_perfect_draft_is_accepted_for_seeded_sampling_too(fake):
    harness, _ = pair(fake, 4)
    config = SamplingConfig(temperature=1.5, top_k=0, seed=11, repetition_penalty=1.1)
    harness.add(Request(PROMPT, 60, config))
    harness.run()
    assert harness.loop.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("by_logits", [False, True])
def test_an_unrelated_draft_leaves_the_output_right(fake, by_logits):
    draft = fake.Engine(agreement=0.0)
    drafter = DraftEngineDrafter(draft, 4)
    harness = fake.Harness(fake.Engine(), drafter, draft=draft, by_logits=by_logits)
    sequence = harness.add(Request(PROMPT, 60))
    harness.run()
    assert sequence.tokens[5:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert harness.loop.stats.acceptance_rate < 0.2


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("offset", range(4))
def test_rejection_at_every_position_with_a_block_border_at_every_offset(fake, place, offset):
    """Blocks hold 4 tokens; the prompt's length moves the border through the round."""

    class WrongAt(DraftEngineDrafter):
        def propose(self, batch):
            proposals = super().propose(batch)
            for proposal in proposals:
                if place < len(proposal.tokens):
                    proposal.tokens[place] = (proposal.tokens[place] + 1) % 23
            return proposals

    draft = fake.Engine()
    harness = fake.Harness(fake.Engine(), WrongAt(draft, 4), draft=draft)
    sequence = harness.add(Request(PROMPT + (2,) * offset, 50))
    while harness.scheduler.has_work:
        for commit in harness.step().commits:
            # Wrong ids were never fed, so the draft's cache has to be cut before the next round.
            assert commit.accepted == min(place, commit.num_drafts)
    wanted = fake.plain_answer(harness.target, sequence.request)[0]
    assert sequence.tokens[5 + offset :] == wanted


def test_rounds_without_drafts_are_caught_up_when_drafting_resumes(fake):
    harness, draft = pair(fake, 3, max_num_tokens=4)
    sequence = harness.add(Request(PROMPT, 60))
    harness.step()
    plan = harness.scheduler._rounds
    harness.scheduler._rounds = lambda generation, _: plan(generation, 0)  # a full step
    for _ in range(9):
        harness.step()
    assert sequence.kv_lens[DRAFT_GROUP] == 5 and sequence.kv_len == 14
    harness.scheduler._rounds = plan
    draft.num_tokens.clear()
    harness.step()
    assert draft.num_tokens == [4, 4, 2, 1, 1]
    harness.run()
    assert sequence.tokens[5:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert harness.loop.stats.acceptance_rate == 1.0


def test_drafting_stops_at_the_drafts_own_length_limit_and_generation_goes_on(fake):
    harness, draft = pair(fake, 4, max_seq_len=20)
    sequence = harness.add(Request(PROMPT, 60))
    proposed = []
    while harness.scheduler.has_work:
        length = len(sequence.tokens)
        drafts = [commit.num_drafts for commit in harness.step().commits]
        proposed.append((length, drafts[0]))
    assert sequence.tokens[5:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert (16, 4) in proposed  # positions 15 to 18 are fed, the draft after 18 is 19's token
    assert all(drafts == 0 for length, drafts in proposed if length > 20)


def test_a_prompt_longer_than_the_draft_can_hold_runs_without_drafts(fake):
    harness, draft = pair(fake, 4, max_seq_len=20)
    sequence = harness.add(Request(tuple(range(22)), 30))
    harness.run()
    assert sequence.tokens[22:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert harness.loop.stats.draft_tokens == 0


def test_nothing_is_drafted_after_an_end_id(fake):
    plain = fake.plain_answer(fake.Engine(), Request(PROMPT, 30))[0]
    harness, draft = pair(fake, 7)
    harness.add(Request(PROMPT, 30, end_id=plain[3]))
    harness.step()
    commit = harness.step().commits[0]
    assert commit.num_drafts == plain.index(plain[3])


def test_ids_the_target_lacks_are_never_proposed(fake):
    harness, _ = pair(fake, 4, extra_vocab=5)
    harness.add(Request(PROMPT, 40))
    harness.run()
    assert harness.loop.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("by_logits", [False, True])
def test_a_draft_with_fewer_ids_than_the_target_works(fake, by_logits):
    draft = fake.Engine(vocab_size=20)
    harness = fake.Harness(
        fake.Engine(), DraftEngineDrafter(draft, 3), draft=draft, by_logits=by_logits
    )
    config = SamplingConfig(temperature=2.0, top_k=0, frequency_penalty=0.1)
    sequence = harness.add(Request(tuple(range(15, 23)), 60, config))
    harness.run()
    assert max(sequence.tokens[8:]) >= 20
    if not by_logits:
        assert sequence.tokens[8:] == fake.plain_answer(harness.target, sequence.request)[0]


def test_a_batch_is_split_to_what_the_draft_engine_takes(fake):
    harness, draft = pair(fake, 3, max_batch_size=2, max_num_tokens=3)
    sequences = [harness.add(Request((i, *PROMPT), 30)) for i in range(6)]
    harness.run()
    assert max(draft.num_tokens) <= 3
    for sequence in sequences:
        wanted = fake.plain_answer(harness.target, sequence.request)[0]
        assert sequence.tokens[6:] == wanted


def test_reused_prompts_are_valid_in_the_drafts_cache_too(fake):
    harness, draft = pair(fake, 3)
    harness.add(Request(tuple(range(18)), 5))
    harness.run()
    draft.num_tokens.clear()
    sequence = harness.add(Request((*range(18), 7), 20))
    harness.step()
    assert draft.num_tokens == [1]
    harness.run()
    assert sequence.tokens[19:] == fake.plain_answer(harness.target, sequence.request)[0]
    assert harness.loop.stats.acceptance_rate == 1.0


def test_kept_distributions_have_one_row_per_draft_over_the_targets_ids(fake):
    draft = fake.Engine(extra_vocab=5)
    drafter = DraftEngineDrafter(draft, 3)
    harness = fake.Harness(fake.Engine(), drafter, draft=draft, by_logits=True)
    harness.add(Request(PROMPT, 20, SamplingConfig(temperature=1.0, top_k=5)))
    harness.step()
    proposal = drafter.propose(harness.scheduler.schedule())[0]
    assert proposal.probs.shape == (3, 23)
    np.testing.assert_allclose(proposal.probs.sum(axis=1), 1)
    assert (proposal.probs[range(3), proposal.tokens] > 0).all()


def test_a_draft_length_below_one_and_another_block_size_are_refused(fake):
    with pytest.raises(BadConfig, match="max_draft_len is 0"):
        DraftEngineDrafter(fake.Engine(), 0)
    with pytest.raises(PairMismatch, match="8 tokens per KV block, the target engine 4"):
        fake.Harness(fake.Engine(), DraftEngineDrafter(fake.Engine(tokens_per_block=8), 2))
