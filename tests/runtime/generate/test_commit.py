"""The end of a step for one sequence: tokens, lengths, and what must move in the cache."""

from __future__ import annotations

import pytest

from llmctl.runtime.generate.commit import commit
from llmctl.runtime.request import FinishReason, Request, Sequence


def sequence_of(tokens: list[int], room: int = 20, **fields) -> Sequence:
    request = Request((1,), max_tokens=room, **fields)
    made = Sequence(1, 1, request, 0, list(tokens), 1, max_len=len(tokens) + room)
    made.kv_len = len(tokens) - 1
    return made


def test_a_chain_moves_nothing():
    sequence = sequence_of([1, 2, 3])
    done = commit(sequence, [7, 8, 9], range(2), 4)
    assert sequence.tokens == [1, 2, 3, 7, 8, 9] and sequence.kv_len == 5
    assert (done.num_tokens, done.num_drafts, done.accepted, done.moves) == (3, 4, 2, ())


def test_a_path_that_is_no_prefix_moves_to_where_its_tokens_are():
    """Draft i was computed at position 3 + i."""
    sequence = sequence_of([1, 2, 3])
    done = commit(sequence, [7, 8, 9, 4], [1, 2, 5], 6)
    assert done.moves == ((4, 3), (5, 4), (8, 5)) and sequence.kv_len == 6
    sequence = sequence_of([1, 2, 3])
    assert commit(sequence, [7, 8, 4], [0, 3], 6).moves == ((6, 4),)


def test_moves_may_be_done_one_after_the_other():
    """No move overwrites what a later one reads: targets rise, and lie below their sources."""
    done = commit(sequence_of([1, 2]), [5, 6, 7, 8, 9], [1, 2, 3, 7], 8)
    places = {2 + i: i for i in range(8)}  # position -> draft
    for source, target in done.moves:
        places[target] = places[source]
    assert [places[2 + depth] for depth in range(4)] == [1, 2, 3, 7]


@pytest.mark.parametrize("fields", [{"end_id": 8}, {"stop_words": ((7, 8),)}])
def test_what_lies_behind_a_stop_is_not_moved(fields):
    sequence = sequence_of([1, 2, 3], **fields)
    done = commit(sequence, [7, 8, 9, 4], [1, 2, 5], 6)
    assert sequence.tokens == [1, 2, 3, 7, 8]
    assert sequence.finish_reason is not FinishReason.NOT_FINISHED
    assert done.num_tokens == 2 and sequence.kv_len == 4 and done.moves == ((4, 3),)
    # "accepted" counts what the rule kept, the stop aside.
    assert done.accepted == 3
