"""Which steps are replayed, what they are padded to, and which graphs are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits, StepShape
from llmctl.plugins.backends.cuda.program import MAX_COUNTS
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines import graphs
from llmctl.runtime.engines.graphs import Buckets, GraphCache, kv_bucket, pad, shape_of

TARGET = StepLimits(
    max_num_tokens=2048,
    max_num_rows=132,
    max_batch_size=12,
    max_seq_len=5000,
    max_draft_len=10,
    tokens_per_block=32,
    kv_dtype="float8_e4m3fn",
)
DRAFT = StepLimits(2048, 12, 12, 5000, 0, 32, "float8_e4m3fn")


def shape(requests: int, query: int, rows: int | None = None, kv_len: int = 700) -> StepShape:
    tokens = requests * query
    return StepShape(tokens, requests, tokens if rows is None else rows, query, kv_len)


@pytest.mark.parametrize(
    ("limits", "found", "wanted"),
    [
        (TARGET, shape(1, 1), shape(1, 1, kv_len=1024)),
        (TARGET, shape(1, 11), shape(1, 11, kv_len=1024)),
        (TARGET, shape(3, 11, kv_len=1025), shape(4, 11, kv_len=1536)),
        (TARGET, shape(3, 11, kv_len=1537), shape(4, 11, kv_len=2048)),
        (TARGET, shape(9, 11, kv_len=4097), shape(12, 11, kv_len=5000)),
        (TARGET, shape(2, 5), shape(2, 8, kv_len=1024)),
        (TARGET, shape(2, 9), shape(2, 11, kv_len=1024)),
        (DRAFT, shape(5, 1), shape(8, 1, kv_len=1024)),
        (DRAFT, shape(5, 2, rows=5), shape(8, 2, rows=8, kv_len=1024)),
    ],
)
def test_generation_is_padded_to_a_bucket(
    limits: StepLimits, found: StepShape, wanted: StepShape
) -> None:
    assert Buckets(limits).fit(found) == wanted


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        (TARGET, shape(1, 12, rows=1)),  # a prompt chunk
        (TARGET, shape(3, 2, rows=2)),  # the chunk of one prompt gets no logits
        (TARGET, shape(1, 2, rows=0)),
        (DRAFT, shape(1, 3, rows=1)),
        (StepLimits(16, 132, 12, 5000, 10, 32, "bfloat16"), shape(3, 5)),  # 4 * 8 tokens
    ],
)
def test_prompts_and_what_padding_would_push_over_a_limit_are_launched_directly(
    limits: StepLimits, found: StepShape
) -> None:
    assert Buckets(limits).fit(found) is None


def make_step(counts: list[int], starts: list[int], all_rows: bool) -> StepInputs:
    cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = int(cu_q[-1])
    rows = np.arange(tokens) if all_rows else cu_q[1:] - 1
    return StepInputs(
        token_ids=np.arange(100, 100 + tokens, dtype=np.int32),
        position_ids=np.concatenate(
            [np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        ).astype(np.int32),
        cu_q=cu_q,
        kv_len=np.array([s + c for s, c in zip(starts, counts, strict=True)], np.int32),
        block_tables=np.arange(len(counts) * 3, dtype=np.int32).reshape(-1, 3),
        slot_mapping=np.arange(7, 7 + tokens, dtype=np.int32),
        logit_rows=rows.astype(np.int32),
    )


@given(
    st.lists(st.tuples(st.integers(1, 11), st.integers(0, 4900)), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_padded_step_keeps_the_step_and_adds_nothing_that_a_kernel_may_see(
    requests: list[tuple[int, int]], all_rows: bool
) -> None:
    step = make_step([c for c, _ in requests], [s for _, s in requests], all_rows)
    found = shape_of(step)
    bucket = Buckets(TARGET).fit(found)
    assert bucket is not None
    padded = pad(step, bucket)
    tokens, count = step.num_tokens, step.num_requests
    sizes = (padded.num_tokens, padded.num_requests, padded.num_rows)
    assert sizes == (bucket.num_tokens, bucket.num_requests, bucket.num_rows)
    assert bucket.max_kv_len >= found.max_kv_len and bucket.max_query_len >= found.max_query_len
    for name in StepInputs.__slots__:
        before, after = getattr(step, name), getattr(padded, name)
        if name in ("trees", "best_only", "context_end"):
            assert not before and before is after
            continue
        assert after.dtype == np.int32 and (after[: len(before)] == before).all()
    assert (padded.slot_mapping[tokens:] == -1).all() and not padded.position_ids[tokens:].any()
    assert (padded.cu_q[count:] == tokens).all() and not padded.kv_len[count:].any()
    assert not padded.logit_rows[step.num_rows :].any()


def test_requests_of_padding_have_no_tokens_with_fp8_products() -> None:
    step = make_step([300, 1], [256, 8], all_rows=False)
    step.context_end = np.array([512, 0], np.int32)
    shape = replace(Buckets(TARGET).round_up(shape_of(step)), num_requests=4)
    found = pad(step, shape).context_end
    assert found is not None and found.tolist() == [512, 0, 0, 0] and found.dtype == np.int32


def test_a_step_of_best_ids_has_graphs_of_its_own() -> None:
    step = make_step([1, 1], [7, 8], all_rows=False)
    gathering = Buckets(TARGET).fit(shape_of(step))
    step.best_only = True
    bucket = Buckets(TARGET).fit(shape_of(step))
    assert bucket is not None and gathering is not None and bucket != gathering
    assert bucket == replace(gathering, best_only=True)
    assert pad(step, replace(bucket, num_requests=4)).best_only
    assert Buckets(TARGET).round_up(shape_of(step)).best_only


@given(st.integers(1, 2048), st.integers(12, 2048), st.integers(0, 4900))
def test_steps_with_prompts_come_in_few_shapes_a_sixteenth_larger_at_most(
    num_tokens: int, query: int, start: int
) -> None:
    found = StepShape(num_tokens, 3, 2, min(query, num_tokens), min(start + query, 5000))
    rounded = Buckets(TARGET).round_up(found)
    assert num_tokens <= rounded.num_tokens <= max(num_tokens * 17 / 16, num_tokens + 7)
    assert rounded.num_tokens in {*range(0, 257, 8), *range(256, 2049, 16)}
    assert (rounded.num_requests, rounded.num_rows) == (3, 2)
    assert found.max_query_len <= rounded.max_query_len and found.max_kv_len <= rounded.max_kv_len
    counts = [num_tokens - 2, 1, 1] if num_tokens > 2 else [num_tokens]
    step = make_step(counts, [0] * len(counts), False)
    padded = pad(step, Buckets(TARGET).round_up(shape_of(step)))
    assert padded.num_requests == step.num_requests and padded.num_rows == step.num_rows
    assert (padded.slot_mapping[step.num_tokens :] == -1).all()


@pytest.mark.parametrize("most", [2048, 16384])
def test_every_size_of_a_prompt_step_is_among_those_prepared(most: int) -> None:
    buckets = Buckets(replace(TARGET, max_num_tokens=most))
    sizes = [shape.num_tokens for shape in buckets.prompt_shapes(10**6)]
    assert len(sizes) == len(set(sizes)) <= MAX_COUNTS  # all are kept
    for count in range(32, most + 1):
        assert buckets.round_up(StepShape(count, 5, 3, 20, 900)).num_tokens in sizes
    assert max(shape.num_tokens for shape in buckets.prompt_shapes(500)) in (496, 504, 512)
    assert buckets.prompt_shapes(0) == []


@pytest.mark.parametrize("single", [0, 1, 32])
def test_a_long_prompt_is_padded_little_and_counts_apart_from_those_beside_it(single: int) -> None:
    buckets = Buckets(replace(TARGET, max_num_tokens=9216))
    step = make_step([3000, 3000, 2192, *[1] * single], [0] * 3 + [500] * single, False)
    found = shape_of(step)
    assert found.num_single == single
    rounded = buckets.round_up(found)
    assert rounded.num_tokens == {0: 8192, 1: 8320, 32: 8320}[single]
    assert rounded.num_single == max(0, single - 1), "three are counted as four"
    assert rounded.num_requests == 3 + single


def test_short_requests_count_apart_where_chunks_take_room_by_their_number() -> None:
    everywhere = replace(TARGET, max_num_tokens=9216, fp8_generation=True)
    step = make_step([3000, 18, 17, 11, 1, 1], [0, *[500] * 5], False)
    found = shape_of(step)
    assert found.num_short == 4
    assert Buckets(everywhere).round_up(found).num_short == 4
    assert Buckets(everywhere).round_up(replace(found, num_short=3)).num_short == 2, "3 are 4"
    assert Buckets(replace(everywhere, fp8_generation=False)).round_up(found).num_short == 0


def test_context_lengths_share_few_buckets() -> None:
    buckets = {kv_bucket(length, TARGET) for length in range(1, 5001)}
    assert buckets == {1024, 1536, 2048, 4096, 5000}


class Log:
    """Enqueues and graphs as a list of words."""

    def __init__(self, max_graphs: int = graphs.MAX_GRAPHS) -> None:
        self.words: list[str] = []
        self.cache = GraphCache(self.capture, max_graphs)

    def run(self, found: StepShape) -> None:
        self.cache.run(found, lambda: self.enqueue(found))

    def enqueue(self, found: StepShape) -> None:
        self.words.append(f"enqueue {found.num_tokens}")

    def capture(self, record):
        record()
        self.words[-1] = self.words[-1].replace("enqueue", "capture")
        name = self.words[-1].replace("capture", "replay")

        class Graph:
            @staticmethod
            def replay() -> None:
                self.words.append(name)

        return Graph()


def test_a_shape_runs_directly_then_is_captured_then_replayed() -> None:
    log = Log()
    for query in (1, 1, 4, 1, 4):
        log.run(shape(1, query))
    first = ["enqueue 1", "capture 1", "replay 1", "enqueue 4", "capture 4", "replay 1"]
    assert log.words == [*first, "replay 4"]
    log.cache.clear()
    log.run(shape(1, 4))
    assert log.words[-2:] == ["enqueue 4", "capture 4"]


def test_the_graph_not_used_for_longest_goes_first() -> None:
    log = Log(max_graphs=2)
    for query in (1, 2, 1, 3, 1, 2):
        log.run(shape(1, query))
    assert log.words[-3:] == ["replay 1", "enqueue 2", "capture 2"]
    assert len(log.cache) == 2


def test_what_cannot_be_captured_yet_is_enqueued_until_it_can() -> None:
    done: list[str] = []
    ready = False

    class Graph:
        def replay(self) -> None:
            done.append("replayed")

    def capture(record: object) -> Graph:
        done.append("captured")
        return Graph()

    held = graphs.capture_when(lambda: ready, capture, lambda: done.append("enqueued"))
    held.replay()
    held.replay()
    ready = True
    held.replay()
    held.replay()
    assert done == ["enqueued", "enqueued", "captured", "replayed", "replayed"]
