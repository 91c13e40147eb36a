"""The packed integers of a step, written out by hand."""

from __future__ import annotations

import numpy as np

from llmctl.runtime.request import Request, Sequence
from llmctl.runtime.step import Span, pack, pack_next


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    request = Request(tuple(tokens), 9)
    return Sequence(1, 1, request, 0, tokens, len(tokens), 99, block_table=blocks)


def test_context_rows_come_first_and_drafts_follow_their_root():
    chunk = Span(sequence([10, 11, 12, 13, 14, 15], [7, 2]), 2, 5, needs_logits=False)
    prompt_end = Span(sequence([20, 21], [5]), 0, 2)
    verify = Span(sequence([30, 31, 32, 33, 34], [1, 9, 4]), 4, 5, drafts=[40, 41])
    step = pack([chunk, prompt_end, verify], tokens_per_block=3)
    assert step.token_ids.tolist() == [12, 13, 14, 20, 21, 34, 40, 41]
    assert step.position_ids.tolist() == [2, 3, 4, 0, 1, 4, 5, 6]
    assert step.cu_q.tolist() == [0, 3, 5, 8]
    assert step.kv_len.tolist() == [5, 2, 7]
    assert step.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 9, 4]]
    assert step.slot_mapping.tolist() == [23, 6, 7, 15, 16, 28, 29, 12]
    assert step.logit_rows.tolist() == [4, 5, 6, 7]
    assert [span.num_rows for span in (chunk, prompt_end, verify)] == [0, 1, 3]


def test_ids_of_prompts_and_of_output_follow_each_other_in_any_order():
    """A paused sequence reads its output as context, too."""
    paused = sequence([50, 51, 52, 53], [3, 8])
    paused.num_prompt_tokens = 2
    spans = [
        Span(sequence([10, 11, 12], [7]), 0, 2, needs_logits=False),
        Span(paused, 1, 4),
        Span(sequence([20, 21], [5]), 1, 2, drafts=[22, 23]),
        Span(paused, 0, 2, needs_logits=False),
    ]
    step = pack(spans, tokens_per_block=3)
    assert step.token_ids.tolist() == [10, 11, 51, 52, 53, 21, 22, 23, 50, 51]
    assert step.token_ids.dtype == np.int32 and step.cu_q.tolist() == [0, 2, 5, 8, 10]
    assert step.logit_rows.tolist() == [4, 5, 6, 7]


def test_tokens_with_fp8_products_are_those_before_the_end_of_their_request():
    tokens = list(range(9))
    first = Span(sequence(tokens, [7, 2, 1]), 0, 8, needs_logits=False, context_end=4)
    rest = Span(sequence(tokens, [5, 6, 3]), 4, 9, context_end=4)
    assert pack([rest, rest], 3).context_end is None, "no token of the step has them"
    step = pack([first, rest], 3)
    assert step.context_end.tolist() == [4, 0] and step.context_end.dtype == np.int32


def test_a_step_of_one_sequence_equals_its_part_of_a_larger_step():
    span = Span(sequence([1, 2, 3, 4, 5], [6, 0, 3, 1]), 4, 5, drafts=[8, 9])
    alone, twice = pack([span], 2), pack([span, span], 2)
    for name in ("token_ids", "position_ids", "slot_mapping", "logit_rows"):
        assert getattr(alone, name).tolist() == getattr(twice, name)[:3].tolist()
    assert alone.kv_len.tolist() == [7] and alone.cu_q.tolist() == [0, 3]
    assert alone.block_tables.tolist() == [[6, 0, 3, 1]]


def test_a_step_of_single_tokens_equals_the_packed_one():
    sequences = [sequence([1, 2, 3], [4, 1]), sequence([5, 6, 7, 8, 9], [0, 2, 3])]
    spans = [Span(item, len(item.tokens) - 1, len(item.tokens)) for item in sequences]
    wanted = pack(spans, 2)
    found = pack_next(
        np.array([3, 9], np.int32), np.array([2, 4], np.int32), wanted.block_tables, 2
    )
    for name in wanted.__slots__:
        left, right = getattr(wanted, name), getattr(found, name)
        if name in ("trees", "best_only", "context_end"):
            assert not left and left is right
            continue
        assert left.dtype == right.dtype == np.int32
        assert left.tolist() == right.tolist(), name
