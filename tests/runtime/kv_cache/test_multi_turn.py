"""What was generated is found by the next turn of the conversation, however it was drafted."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv import BLOCK, PAIR, make_sequence

from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Request, SamplingConfig, Sequence

DRAFT_LEN = 4


class SwitchedLengths:
    """Drafts for everybody or for nobody, as a test sets it; or by turns."""

    beside_prompts = True

    def __init__(self, length):
        self.common = length
        self.period = None
        self.num_planned = 0

    def plan(self, generation):
        if self.period:
            self.num_planned += 1
            self.common = DRAFT_LEN * (self.num_planned // self.period % 2)

    def of(self, sequence):
        return self.common


def harness_of(fake, kind, on_device, **options):
    """A harness, its draft lengths and its draft engine; drafts that often fall."""
    draft, drafter, lengths = None, None, None
    if kind == "ngram":
        drafter, lengths = NgramDrafter(DRAFT_LEN), SwitchedLengths(DRAFT_LEN)
    elif kind != "plain":
        draft = fake.Engine(agreement=0.7, max_seq_len=400)
        drafter = DraftEngineDrafter(draft, DRAFT_LEN)
        lengths = SwitchedLengths(0 if kind == "off" else DRAFT_LEN)
        lengths.period = 7 if kind == "by turns" else None
    target = fake.Engine(max_seq_len=400)
    harness = fake.Harness(
        target, drafter, draft=draft, draft_lengths=lengths, on_device=on_device, **options
    )
    return harness, lengths


def turn(harness, tokens, count, seed):
    """Run one turn to its end; prompt tokens found in the cache, and everything said so far."""
    params = SamplingConfig(temperature=0.8, top_k=0, seed=seed)
    request = Request(tuple(tokens), count, params)
    sequence = harness.add(request)
    while harness.scheduler.has_work:
        harness.step()
        audit_tree(harness)
    return sequence.blocks.num_reused_tokens, sequence.tokens, request


def audit_tree(harness):
    """Every block in the tree holds its own committed tokens, in both engines where it says so."""
    pending = {copy.dst_block for copy in harness.kv_cache._store.copies}
    for node in harness.kv_cache._store.tree.nodes():
        if not node.is_on_device or node.block_id in pending:
            continue
        engines = [harness.target]
        engines += [harness.draft] if harness.draft is not None and node.groups == 3 else []
        for engine in engines:
            start = node.block_id * engine.tokens_per_block
            assert tuple(engine.cache[start : start + engine.tokens_per_block]) == node.key.tokens


@pytest.mark.parametrize(
    ("kind", "on_device"),
    [
        ("ngram", False),  # looked up by the host
        *((kind, device) for kind in ("plain", "on", "off", "by turns") for device in (0, 1)),
    ],
)
def test_the_next_turn_finds_what_was_generated(fake, kind, on_device):
    harness, _ = harness_of(fake, kind, on_device)
    generator = np.random.default_rng(3)
    said, words = generator.integers(0, 23, 13).tolist(), []
    for number in range(4):
        before = list(said)
        found, said, request = turn(harness, said, 40, number)
        assert said[len(before) :] == fake.plain_answer(harness.target, request)[0]
        if number:
            # The last token is in no cache, and the draft may lack one of the block before it.
            assert found >= len(before) - len(words) - 1 - BLOCK
        words = generator.integers(0, 23, 7).tolist()
        said = said + words


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["plain", "off", "by turns"])
def test_a_sequence_that_still_runs_is_found_as_well(fake, kind, on_device):
    harness, _ = harness_of(fake, kind, on_device)
    params = SamplingConfig(temperature=0.8, top_k=0, seed=1)
    first = harness.add(Request(tuple(range(10)), 80, params))
    while len(first.tokens) < 60:
        harness.step()
    second = harness.add(Request((*first.tokens[:56], 3), 10, params))
    harness.run()
    assert second.blocks.num_reused_tokens >= 48
    assert second.tokens[57:] == fake.plain_answer(harness.target, second.request)[0]


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_come_back_over_blocks_that_the_draft_engine_never_read(fake, on_device):
    harness, lengths = harness_of(fake, "off", on_device)
    _, said, _ = turn(harness, [1, 2, 3, 4, 5], 60, 1)
    lengths.common = DRAFT_LEN
    nodes = harness.kv_cache._store.tree.nodes()
    assert sum(node.groups == 1 for node in nodes) > 10
    found, said, request = turn(harness, [*said, 9], 30, 2)
    assert found >= 60
    assert said[-30:] == fake.plain_answer(harness.target, request)[0]
    assert all(node.groups == 3 for node in nodes), "read in the next prompt, once for everybody"
    stats = harness.loop.stats
    assert stats.draft_tokens and stats.accepted_tokens > 0.4 * stats.draft_tokens


@pytest.mark.parametrize("on_device", [False, True])
def test_two_that_share_unread_blocks_catch_up_side_by_side(fake, on_device):
    harness, lengths = harness_of(fake, "off", on_device)
    _, said, _ = turn(harness, [1, 2, 3, 4, 5], 60, 1)
    lengths.common = DRAFT_LEN
    params = SamplingConfig(temperature=0.8, top_k=0, seed=4)
    sequences = [harness.add(Request((*said[:50], last), 20, params)) for last in (7, 8)]
    while harness.scheduler.has_work:
        harness.step()
        audit_tree(harness)
    for sequence in sequences:
        assert sequence.blocks.num_reused_tokens >= 48
        wanted = fake.plain_answer(harness.target, sequence.request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted


def grown(cache, sequence_id, tokens, num_drafted):
    """A sequence with all but its last token in the target's cache and some in the draft's."""
    sequence = make_sequence(sequence_id, tokens)
    cache.match_and_attach(sequence)
    assert cache.reserve(sequence, len(tokens))
    sequence.kv_len = len(tokens) - 1
    sequence.kv_lens[1] = num_drafted
    cache.publish(sequence)
    cache.check_invariants()
    return sequence


def test_a_block_without_the_drafts_part_is_given_it_by_whoever_has_it():
    cache = KvCacheManager(16, BLOCK, groups=PAIR)
    first, second = make_sequence(1, range(13)), make_sequence(2, range(13))
    for sequence, drafted in ((first, 0), (second, 12)):
        cache.match_and_attach(sequence)
        assert cache.reserve(sequence, 13)
        sequence.kv_lens = [12, drafted]
    own = list(second.block_table)
    cache.publish(first)
    assert cache.lookup(make_sequence(3, range(13))).full.depth == 3
    cache.publish(second)
    moves = [(copy.src_block, copy.dst_block) for copy in cache.pending_copies()]
    assert moves == list(zip(own[:3], first.block_table[:3], strict=True))
    assert second.block_table[:3] == first.block_table[:3] and second.kv_lens[1] == 12
    cache.check_invariants()
    third = make_sequence(3, range(13))
    assert cache.match_and_attach(third) == 12 and third.kv_lens[1] == 12


def publish_alike(first_drafted: int, second_drafted: int) -> tuple[KvCacheManager, list[Sequence]]:
    """Two sequences of the same tokens, of which the draft engine has read so many."""
    cache = KvCacheManager(16, BLOCK, groups=PAIR)
    pair = [make_sequence(1, range(13)), make_sequence(2, range(13))]
    for sequence, drafted in zip(pair, (first_drafted, second_drafted), strict=True):
        cache.match_and_attach(sequence)
        assert cache.reserve(sequence, 13)
        sequence.kv_lens = [12, drafted]
    for sequence in pair:
        cache.publish(sequence)
    return cache, pair


def test_a_lagging_draft_gains_from_blocks_that_another_drafted():
    cache, (first, second) = publish_alike(12, 0)
    assert second.block_table[:3] == first.block_table[:3] and second.kv_lens[1] == 12
    assert cache.pending_copies() == []


def test_what_a_draft_computed_of_a_block_ends_where_its_owner_changes_over():
    _, (_, second) = publish_alike(0, 6)
    assert second.kv_lens[1] == 4, "two tokens of the second block were in the one given up"


def test_a_block_that_a_round_in_flight_may_still_write_is_not_published():
    cache = KvCacheManager(16, BLOCK, groups=PAIR)
    grown(cache, 1, range(13), 11)
    assert cache.lookup(make_sequence(2, range(14))).full.depth == 2
