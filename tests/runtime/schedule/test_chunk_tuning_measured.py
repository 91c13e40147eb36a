"""The knee on a real engine: what the controller finds from its own clock is nearly the best of all
sizes by another's."""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time

import numpy as np
import pytest
from support.tiny_pair import build_pair

from llmctl.plugins.backends.cpu.binding import num_threads, set_num_threads
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.request import Request, Sequence
from llmctl.runtime.schedule.chunk_tuning import KneeTuner
from llmctl.runtime.step import Span, pack

REPEATS = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Engine]:
    engine, _ = build_pair(tmp_path_factory.mktemp("wide"), hidden_size=384)
    engine.allocate_kv_cache(engine.max_num_tokens // engine.tokens_per_block)
    before = num_threads()
    set_num_threads(1)  # a second thread is there at one step and not at the next
    yield engine
    set_num_threads(before)


def time_step(target: Engine, num_tokens: int) -> float:
    """Seconds of one prompt chunk."""
    ids = np.random.default_rng(0).integers(0, target.vocab_size, num_tokens + 1).tolist()
    sequence = Sequence(1, 1, Request(tuple(ids), 4), 0, ids, len(ids), len(ids) + 4)
    sequence.block_table = list(range(-(-len(ids) // target.tokens_per_block)))
    step = pack([Span(sequence, 0, num_tokens, needs_logits=False)], target.tokens_per_block)
    began = thread_time()  # its only thread; others may keep it waiting
    target.run(step)
    return thread_time() - began


def share_of_best(target: Engine) -> float:
    """Tokens/s at the size that a new controller finds, over those of the best size."""
    block, most = target.tokens_per_block, target.max_num_tokens - target.tokens_per_block
    tuner = KneeTuner(block, most)
    for _ in range(KneeTuner.STEPS * 8):
        tuner.observe(tuner.budget, time_step(target, tuner.budget))
    sizes = list(range(block, most + 1, block))
    seconds = {
        size: min(time_step(target, size) for _ in range(REPEATS))
        for size in [*sizes, tuner.budget]
    }
    best = max(size / seconds[size] for size in sizes)
    return tuner.budget / seconds[tuner.budget] / best


def test_the_knee_found_on_the_cpu_is_nearly_as_fast_as_the_best_fixed_size(target):
    # It aims at 3 % (KEEP) of the best size that it measured; the rest, and two more tries, are for
    # sizes between the halves and for a machine that others use too.
    shares: list[float] = []
    while not shares or (shares[-1] < 0.88 and len(shares) < 3):
        shares.append(share_of_best(target))
    assert shares[-1] >= 0.88, shares
