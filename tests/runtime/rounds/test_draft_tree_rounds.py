"""Trees of a draft engine in rounds, on a device made of fakes: the host's drafts, exact text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cuda_rounds import Capture, Lengths, OnDevice
from support.fake_engine import FakeEngine, plain_answer
from support.fake_loop import Harness
from support.round_requests import random_request
from support.rounds_by_reference import run_rounds_by_reference
from torch.utils._python_dispatch import TorchDispatchMode

from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.tree_growth import kernel
from llmctl.plugins.ops.tree_growth.arrays import growth_bytes
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.device_trees import DeviceDraftTrees
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.tree import DraftTree, parse_tree
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.engines.open_gpu import OpenedOnGpu
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.upload import tree_bytes
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB = 23


class DeviceEngine(OnDevice, FakeEngine):
    """Has what a runner asks of a CudaEngine. As a draft, how far keys were moved."""

    num_moves = 0

    def feed(self, step) -> None:
        self.run(step)

    def enqueue_moves(self, starts, moves) -> None:
        def run() -> None:
            ends = starts.tolist()
            for first, end in zip(ends, ends[1:], strict=False):
                own = moves[first:end].tolist()
                for index, (source, target) in enumerate(own):
                    assert min(source, target) >= 0
                    assert target not in [later for later, _ in own[index + 1 :]]
                    self.cache[target] = self.cache[source]
                    self.num_moves += 1

        self.program.launch([run], 0)


class TreeDevice:
    """Both engines, both drafters and the runner."""

    def __init__(
        self, tree: DraftTree, *, agreement: float = 1.0, max_batch_size: int = 4, **draft: Any
    ) -> None:
        self.tree = tree
        shape = DynamicShape(tree.branch, tree.width, tree.depth)
        sizes = {"max_batch_size": max_batch_size, "vocab_size": VOCAB}
        sizes["max_draft_len"] = max(tree.nodes, 2)
        sizes["max_num_tokens"] = max_batch_size * (sizes["max_draft_len"] + 1)
        self.target = DeviceEngine(**sizes)
        self.draft = DeviceEngine(**{**sizes, "agreement": agreement, **draft})
        self.draft.queue = self.target.queue
        self.drafter = DraftEngineDrafter(self.draft, tree.nodes, shape)
        self.capture = Capture([self.target.program, self.draft.program])
        made = DraftEngine(Path("draft"), tree=tree).make_device_drafter(
            {"draft": self.draft}, tree.nodes, self.drafter
        )
        assert isinstance(made, DeviceDraftTrees)
        self.runner = CudaRoundRunner(self.target, made, self.capture)

    def harness(self, *, by_device: bool = True, **options: Any) -> Harness:
        runner = self.runner if by_device else None
        found = Harness(self.target, self.drafter, draft=self.draft, runner=runner, **options)
        found.oracle = FakeEngine(vocab_size=VOCAB)
        return found


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    run_rounds_by_reference(monkeypatch)


TREES = [*map(parse_tree, ("4,3,12", "1,4,4", "3,1,3", "6,2,9", "5,3,11,1"))]


@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_any_schedule_gives_the_plain_answer(schedule, agreement):
    """Chunks, pauses, cancels, steps of the host between rounds, lengths that change; after every
    step the draft's cache has the keys of the tokens that count as read."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    tree = TREES[schedule % len(TREES)]
    device = TreeDevice(
        tree,
        agreement=agreement,
        max_batch_size=int(generator.choice([2, 4])),
        max_seq_len=int(generator.choice([48, 96])),
        extra_vocab=int(generator.choice([0, 3])),
    )
    is_small = schedule == 5
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION if is_small else None
    harness = device.harness(
        num_blocks=40 if is_small else 200,
        config=SchedulerConfig(policy) if policy else None,
        draft_lengths=Lengths((0, 1, tree.nodes, tree.nodes), schedule) if schedule > 2 else None,
    )
    requests = [random_request(generator, VOCAB) for _ in range(9)]
    harness.run_arriving(generator, requests, horizon=90)
    assert device.runner._num_started > 3
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


def commits_of(device: TreeDevice, requests, by_device: bool):
    """What every round of each request drafted and accepted."""
    harness = device.harness(by_device=by_device)
    found: dict[int, list[tuple[int, int, int]]] = {}
    sequences = [harness.add(request) for request in requests]
    while harness.scheduler.has_work:
        report = harness.step()
        pairs = list(zip(report.batch.generation, report.commits[len(report.batch.context) :],
                         strict=True))  # fmt: skip
        for item, commit in pairs:
            own = found.setdefault(item.sequence.sequence_id, [])
            own.append((item.start, commit.num_drafts, commit.accepted))
    for sequence, request in zip(sequences, requests, strict=True):
        answer = plain_answer(FakeEngine(vocab_size=VOCAB), request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == answer
    return found


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("agreement", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("end_id", [None, 5])
def test_rounds_of_the_device_are_those_of_the_host(tree, agreement, end_id):
    """From the same text the same drafts, of which as many are accepted; sampled requests have
    chains in either. Keys that were moved elsewhere would end paths early."""
    sampled = SamplingConfig(temperature=0.9, top_k=0, seed=7)
    requests = [
        Request((3, 1, index), 70, sampled if index == 2 else SamplingConfig(), end_id=end_id)
        for index in range(4)
    ]
    device = TreeDevice(tree, agreement=agreement)
    host = commits_of(TreeDevice(tree, agreement=agreement), requests, by_device=False)
    found = commits_of(device, requests, by_device=True)
    assert found == host
    assert device.runner._num_started > 5
    if agreement < 1 and tree.width > 1 and tree.depth > 1 and end_id is None:
        assert device.draft.num_moves, "an accepted path was not the likeliest"


def test_rounds_by_kernels_are_those_of_the_host(monkeypatch):
    """In Triton's interpreter."""
    monkeypatch.setattr("llmctl.runtime.drafting.growth.device.kernel", kernel)
    tree = DraftTree(4, 3, 12)
    requests = [Request((3, 1, index), 30) for index in range(2)]
    host = commits_of(TreeDevice(tree, agreement=0.7), requests, by_device=False)
    assert commits_of(TreeDevice(tree, agreement=0.7), requests, by_device=True) == host


def test_the_host_is_a_round_behind_and_what_is_accepted_is_not_read_again():
    device = TreeDevice(DraftTree(4, 2, 8))
    harness = device.harness()
    sequence = harness.add(Request((3, 1, 4), 80))
    ahead = 0
    while harness.scheduler.has_work:
        harness.step()
        ahead += len(device.runner._in_flight)
        if len(sequence.tokens) > 5 and harness.scheduler.has_work:
            assert sequence.kv_lens[DRAFT_GROUP] >= len(sequence.tokens) - 2
    assert ahead > 8


def test_a_failed_round_leaves_nothing_behind():
    device = TreeDevice(DraftTree(4, 3, 12), agreement=0.7)
    harness = device.harness()
    harness.add(Request((1, 2, 3), max_tokens=60))
    for _ in range(4):
        harness.step()
    device.draft.program.fail = RuntimeError("CUDA error: an illegal memory access")
    late = harness.add(Request((4, 5), max_tokens=20))
    with pytest.raises(Exception, match="illegal memory access"):
        harness.run()
    device.draft.program.fail = None
    for victim in list(harness.scheduler.active):
        harness.cancel(victim)
    again = harness.add(replace(late.request, max_tokens=30))
    harness.run()
    assert again.tokens[2:] == plain_answer(harness.oracle, again.request)[0]


@pytest.mark.parametrize(
    ("tree", "draft_drafts", "is_led"),
    [
        (DraftTree(4, 3, 12), 3, True),
        (DraftTree(4, 3, 12), 2, False),  # paths are longer than the engine's
        (DraftTree(2, 5, 12), 3, False),  # levels are wider
        (DraftTree(2, 3, 4), 1, False),  # no kernels for trees
        (DraftTree(2, 16, 40), 63, True),
        (DraftTree(2, 17, 40), 63, False),  # wider than the kernels
        (DraftTree(1, 20, 12), 63, True),  # which 12 drafts do not need
        (DraftTree(12, 2, 24, 1), 0, True),  # by steps of a chain
        (DraftTree(32, 2, 64, 1), 0, False),
    ],
)
def test_the_device_leads_where_its_kernels_are_wide_enough(tree, draft_drafts, is_led):
    target = DeviceEngine(max_draft_len=63)
    draft = DeviceEngine(max_draft_len=draft_drafts)
    engines = {"target": target, "draft": draft}
    loaded = SimpleNamespace(engines=engines, sampling=None, has_rounds=True)
    method = DraftEngine(Path("draft"), tree=tree)
    opened = OpenedOnGpu(loaded, "a GPU")
    runner = opened.make_round_runner(method, None, tree.nodes, None, ())
    assert (runner is not None) == is_led
    if runner is not None:
        assert runner.drafter.followed() is None, "ranks with a GPU each draft no trees"
    assert not replace(method, acceptance="logits").is_device_led


def test_the_memory_plan_counts_trees_that_a_draft_engine_may_draft():
    logits = SimpleNamespace(name="logits", shape=("rows", 5000))
    plan = SimpleNamespace(
        tensors=[logits], logits="logits", heads={}, head_caches={}, head_shares=None
    )
    assert tree_bytes(plan, 8, 20) == tree_bytes(plan, 8, 1, may_grow=True) == 0
    grown = growth_bytes(8, 20, 5000)
    assert tree_bytes(plan, 8, 20, may_grow=True) > grown > 4 * 8 * 16 * 3 * 16


def test_sizes_are_asked_for_without_arithmetic() -> None:
    """Of tensors without memory, torch imports its compiler for a sum: seconds of every start."""
    called = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            called.add(function._schema.name)
            return function(*arguments, **(options or {}))

    with Calls():
        growth_bytes(8, 20, 5000)
        DraftTrees.allocate(8, 20, "meta")
        RoundState.allocate(8, 20, "meta")
    assert called >= {"aten::zeros", "aten::full"}
    assert not called & {"aten::add", "aten::sub", "aten::mul"}


def test_trees_are_right_after_graphs_were_captured_while_there_were_no_requests() -> None:
    device = TreeDevice(DraftTree(3, 2, 5), agreement=0.7)
    harness = device.harness()
    for count in (3, 2):
        while harness.loop.prepare_more():
            assert device.runner.num_captured < 200
        captured = device.capture.num_captured
        requests = [Request((3 + index, 1, 4), 20, SamplingConfig()) for index in range(count)]
        sequences = [harness.add(request) for request in requests]
        harness.run()
        assert device.capture.num_captured == captured > 0
        for request, sequence in zip(requests, sequences, strict=True):
            wanted, _ = plain_answer(FakeEngine(vocab_size=VOCAB), request)
            assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
