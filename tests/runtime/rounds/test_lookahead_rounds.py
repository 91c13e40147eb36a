"""Rounds that draft from windows, on a device made of fakes: slots, the host's trees, the text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cuda_rounds import Lengths
from support.fake_engine import plain_answer
from support.lookahead_rounds import VOCAB, LookaheadDevice
from support.round_requests import random_request
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.builder.heads.lookahead.mode import lookahead_sizes
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead.arrays import LAST, POSITION, LookaheadArrays, LookaheadSizes
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.drafting.lookahead.method import LookaheadDecoding
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.rounds.upload import tree_bytes
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

SAMPLED = SamplingConfig(temperature=0.8, top_k=0, seed=3)


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    run_rounds_by_reference(monkeypatch)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 4, 2), (1, 2, 3), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("params", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_a_request_alone_is_accepted_as_much_of_as_by_the_host(sizes, params):
    """Round after round: the device has the host's pool and drafts its trees."""
    request = Request((1, 2, 3, 1, 2, 3, 1), max_tokens=45, sampling_config=params)
    runs, pools = [], []
    for on_device in (False, True):
        device = LookaheadDevice(sizes, built=(4, 4, 3) if on_device else sizes)
        harness = device.harness(on_device=on_device)
        pools.append(noted_pools(device))
        sequence = harness.add(request)
        harness.run()
        assert sequence.tokens[7:] == plain_answer(harness.oracle, request)[0]
        stats = harness.loop.stats
        counts = stats.rounds, stats.draft_tokens, stats.accepted_tokens
        runs.append((*counts, list(stats.accepted_at_position)))
        assert (device.runner._num_started > 5) == on_device
    assert runs[0] == runs[1]
    lengths = pools[0].keys() & pools[1].keys()
    assert len(lengths) > 5 and all(pools[0][n] == pools[1][n] for n in lengths)
    assert runs[0][2] > 0


def noted_pools(device: LookaheadDevice) -> dict[int, dict[int, list[int]]]:
    """The pool of a request that runs alone as every step's drafts were made, on either side: by
    the tokens of the text, each token's n-grams. Filled while steps run."""
    pools: dict[int, dict[int, list[int]]] = {}
    propose, enqueue = device.drafter.propose, device.runner.enqueue

    def propose_and_note(batch):
        drafts = propose(batch)
        for item in batch.generation:
            if item.draft_len:  # else the pool is not asked, and reads later
                rows = device.drafter.state_of(item.sequence).pool.rows.values()
                flat = {token: [n for ngram in ngrams for n in ngram] for token, ngrams in rows}
                pools[len(item.sequence.tokens)] = flat
        return drafts

    def enqueue_and_note(tables, draft_len):
        enqueue(tables, draft_len)
        arrays = device.on_device._arrays
        slot = int(arrays.slots[0])
        last = int(arrays.heads[slot, LAST])
        pools[int(arrays.heads[slot, POSITION]) + 1] = {
            owner - 1: ngrams[: count * last]
            for owner, count, *ngrams in arrays.pools[slot].tolist()
            if owner
        }

    device.drafter.propose, device.runner.enqueue = propose_and_note, enqueue_and_note
    return pools


def windowed_request(generator: np.random.Generator, sizes: tuple[int, int, int]) -> Request:
    """One that may have sizes of its own."""
    style, own = generator.integers(8), None
    if style == 5:
        own = LookaheadDecodingConfig(1, 2, min(1, sizes[2]))
    elif style == 6 and generator.random() < 0.3:
        own = LookaheadDecodingConfig(1, 1, 0)
    return replace(random_request(generator, VOCAB), lookahead_config=own)


@pytest.mark.parametrize("schedule", range(5))
def test_any_schedule_gives_the_plain_answer(schedule):
    """Chunks, pauses, cancels, steps of the host between rounds, lengths that change."""
    generator = np.random.default_rng(schedule)
    sizes = [(3, 3, 2), (2, 2, 1), (1, 4, 2), (3, 2, 3), (2, 3, 2)][schedule]
    device = LookaheadDevice(
        sizes,
        max_batch_size=int(generator.choice([2, 3])),
        whole_context=float(generator.choice([0.0, 3.0])),
    )
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION if schedule == 4 else None
    most = device.drafter.max_draft_len
    harness = device.harness(
        num_blocks=30 if policy else 200,
        config=SchedulerConfig(policy) if policy else None,
        draft_lengths=Lengths((0, 1, most, most), schedule) if schedule in (2, 3) else None,
    )
    requests = [windowed_request(generator, sizes) for _ in range(7)]
    harness.run_arriving(generator, requests, horizon=60)
    assert device.runner._num_started > 3


def test_slots_stay_with_their_sequences_and_are_given_on():
    device = LookaheadDevice((2, 2, 1), max_batch_size=2)
    harness = device.harness()
    on_device = device.on_device
    first, second = (harness.add(Request((i, 2, 3), max_tokens=30)) for i in (1, 2))
    for _ in range(6):
        harness.step()
    slots = dict(on_device._slots)
    assert sorted(slots.values()) == [0, 1]
    harness.cancel(first)
    third = harness.add(Request((7, 8), max_tokens=20))
    for _ in range(6):
        harness.step()
    assert on_device._slots[second.sequence_id] == slots[second.sequence_id]
    assert on_device._slots[third.sequence_id] == slots[first.sequence_id]
    harness.run()
    # One that waits keeps its slot until somebody else has none.
    waits, runs, new = (harness.add(Request((i, 5), max_tokens=9)) for i in (3, 4, 6))
    for asked in ([waits, runs], [runs], [runs, new], [waits, new]):
        on_device._take_slots(asked)
        for sequence in asked:
            device.drafter.state_of(sequence)
        taken = [on_device._slots[sequence.sequence_id] for sequence in asked]
        assert len(set(taken)) == len(asked)


def test_the_host_is_a_round_behind():
    device = LookaheadDevice((3, 3, 2), whole_context=3.0)
    harness = device.harness()
    harness.add(Request((1, 2, 3), max_tokens=30))
    ahead = 0
    while harness.scheduler.has_work:
        harness.step()
        ahead += len(device.runner._in_flight)
    assert ahead > 10


def test_what_engines_are_led_on_the_device():
    """Those that were built with sizes, and no larger ones than theirs."""

    def led(asked, backend="cuda", mode=8, facts=(4, 3, 4)) -> bool:
        names = ("window_size", "ngram_size", "verification_set_size")
        build = {"speculative_decoding_mode": mode, "max_draft_len": 99}
        if facts:
            build["draft_heads"] = dict(zip(names, facts, strict=True))
        sizes = lookahead_sizes(mode, build.get("draft_heads", {}))
        target = SimpleNamespace(
            config=SimpleNamespace(build_config=build, backend=backend),
            program=SimpleNamespace(limits=SimpleNamespace(lookahead=sizes)),
        )
        drafter = LookaheadDrafter(LookaheadDecodingConfig(*asked), 99)
        made = LookaheadDecoding().make_device_drafter({"target": target}, 99, drafter)
        assert made is None or made.depth(99) == asked[0] + asked[1] - 3
        return made is not None

    assert led((4, 3, 4)) and led((2, 3, 1))
    assert not led((5, 3, 4)) and not led((4, 3, 4), facts=())
    assert not led((4, 3, 4), backend="tensorrt")
    assert not led((4, 3, 4), mode=2, facts=())
    assert lookahead_sizes(2, {"window_size": 1}) is None


def test_the_memory_plan_counts_windows_and_pools():
    plan = SimpleNamespace(tensors=[], heads={}, head_caches={}, head_shares=None)
    assert tree_bytes(plan, 8, 20) == 0
    sizes = LookaheadSizes(3, 3, 2)
    arrays, trees = LookaheadArrays.allocate(sizes, 8, 20, "cpu"), DraftTrees.allocate(8, 20, "cpu")
    tensors = [*arrays.tensors, trees.parents, trees.counts, trees.rows, trees.positions]
    tensors += [trees.starts, trees.moves]
    tensors += [getattr(trees.sampling, name) for name in trees.sampling.__slots__]
    assert tree_bytes(plan, 8, 20, sizes) == sum(t.nbytes for t in tensors)
    assert torch.is_tensor(arrays.pools) and arrays.pools.shape == (8, 2048, 2 + 2 * 2)
