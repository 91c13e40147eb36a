"""How a step becomes runs of a plan with slots: who runs together, fed with what."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.slot_groups import (
    Group,
    group_requests,
    pack_arrays,
    packed_words,
    step_arrays,
)

CAPACITY = 100


def make_step(requests: list[tuple[int, int, int, int]]) -> StepInputs:
    """Requests as (slot, tokens before, new tokens, rows of logits at their end)."""
    cu_q = np.cumsum([0, *(new for _, _, new, _ in requests)]).astype(np.int32)
    positions = [np.arange(done, done + new) for _, done, new, _ in requests]
    rows = [np.arange(cu_q[i + 1] - r[3], cu_q[i + 1]) for i, r in enumerate(requests)]
    slots = [r[0] * CAPACITY + p for r, p in zip(requests, positions, strict=True)]
    return StepInputs(
        token_ids=np.arange(100, 100 + cu_q[-1], dtype=np.int32),
        position_ids=np.concatenate(positions).astype(np.int32),
        cu_q=cu_q,
        kv_len=np.array([done + new for _, done, new, _ in requests], np.int32),
        block_tables=np.array([[slot] for slot, *_ in requests], np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        logit_rows=np.concatenate(rows).astype(np.int32),
    )


def test_neighbours_that_read_alike_run_together_in_slot_order() -> None:
    groups = group_requests(make_step([(2, 5, 1, 1), (0, 9, 1, 1), (1, 3, 1, 1), (4, 7, 1, 1)]))
    assert groups == [
        Group(0, (1, 2, 0), 1, (0,), (1, 2, 0)),
        Group(4, (3,), 1, (0,), (3,)),
    ]


def test_chunks_run_alone_and_verifications_of_other_lengths_apart() -> None:
    step = make_step([(0, 0, 9, 1), (1, 0, 9, 1), (2, 8, 5, 5), (3, 8, 5, 5), (4, 8, 3, 3)])
    groups = group_requests(step)
    assert [(g.first_slot, g.requests, g.length, len(g.rows)) for g in groups] == [
        (0, (0,), 9, 1),
        (1, (1,), 9, 1),
        (2, (2, 3), 5, 5),
        (4, (4,), 3, 3),
    ]


def test_a_chunk_without_logits_computes_a_row_that_nobody_gets() -> None:
    (group,) = group_requests(make_step([(3, 0, 6, 0)]))
    assert group == Group(3, (0,), 6, (5,), ())


def test_a_group_is_fed_its_tokens_and_rows_within_the_batch() -> None:
    step = make_step([(1, 20, 3, 2), (0, 4, 3, 2)])
    (group,) = group_requests(step)
    found = {name: array.tolist() for name, array in step_arrays(step, group).items()}
    assert found == {
        "token_ids": [[103, 104, 105], [100, 101, 102]],
        "position_ids": [[4, 5, 6], [20, 21, 22]],
        "write_index": [4, 20],
        "kv_length": [7, 23],
        "logit_rows": [[1, 2], [4, 5]],
        "drafts": [[-1], [-1]],
    }


@st.composite
def steps(draw: st.DrawFn) -> StepInputs:
    slots = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    requests = []
    for slot in slots:
        new = draw(st.sampled_from([1, 1, 2, 5, 9]))
        rows = draw(st.sampled_from([0, 1, new]))
        requests.append((slot, draw(st.integers(0, 20)), new, rows))
    return make_step(requests)


@given(steps())
def test_every_token_is_read_once_in_its_slot_and_every_row_is_delivered_once(step) -> None:
    seen, delivered = [], []
    for group in group_requests(step):
        arrays = step_arrays(step, group)
        assert len(group.requests) == 1 or group.length == 1 or len(group.rows) > 1
        for index, request in enumerate(group.requests):
            assert step.block_tables[request, 0] == group.first_slot + index
            seen += arrays["token_ids"][index].tolist()
        flat = arrays["token_ids"].reshape(-1)
        if group.wanted:
            rows = arrays["logit_rows"].reshape(-1)
            assert len(rows) == len(group.wanted)
            for row, wanted in zip(rows, group.wanted, strict=True):
                assert flat[row] == step.token_ids[step.logit_rows[wanted]]
        delivered += group.wanted
    assert sorted(seen) == step.token_ids.tolist()
    assert sorted(delivered) == list(range(step.num_rows))


@given(steps())
def test_packed_arrays_are_aligned_apart_and_within_the_room_that_is_kept(step) -> None:
    for group in group_requests(step):
        arrays = step_arrays(step, group)
        packed, (starts,) = pack_arrays([arrays])
        assert len(packed) <= packed_words(len(group.requests) * group.length)
        for name, array in arrays.items():
            assert 4 * starts[name] % 256 == 0
            found = packed[starts[name] : starts[name] + array.size]
            assert found.tolist() == array.reshape(-1).tolist()
