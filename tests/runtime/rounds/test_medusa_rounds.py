"""Rounds that draft trees from heads, on a device made of fakes: rows, graphs, exact text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cuda_rounds import Lengths
from support.medusa_rounds import MedusaDevice
from support.round_requests import random_request
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.builder.heads.medusa.tree import DEFAULT, MedusaTree
from llmctl.plugins.device_loop.tree_kernel import MOST_RANKS, num_chunks, num_keys
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.engines.open_gpu import OpenedOnGpu
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.upload import tree_bytes
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB = 23
TREE = MedusaTree.of([(0, 1), (1, 0), (0, 0, 0), (2,), (1, 2, 0), (0, 2)])


@pytest.fixture(autouse=True)
def by_reference(monkeypatch):
    run_rounds_by_reference(monkeypatch)


@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_any_schedule_gives_the_plain_answer(schedule, agreement):
    """Chunks, pauses, cancels, steps of the host between rounds, lengths that change."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    tree = (TREE, MedusaTree(DEFAULT), MedusaTree.of([(0, 0, 0)]))[schedule % 3]
    device = MedusaDevice(
        tree,
        right_rank=0 if agreement == 1.0 else int(generator.integers(3)),
        agreement=agreement,
        draft_len=int(generator.integers(6, 12)) if schedule % 3 == 1 else None,
        max_batch_size=int(generator.choice([2, 4])),
    )
    is_small = schedule == 5
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION if is_small else None
    most = device.drafter.max_draft_len
    harness = device.harness(
        num_blocks=40 if is_small else 200,
        config=SchedulerConfig(policy) if policy else None,
        draft_lengths=Lengths((0, 1, most, most), schedule) if schedule in (3, 4) else None,
    )
    requests = [random_request(generator, VOCAB) for _ in range(9)]
    harness.run_arriving(generator, requests, horizon=90)
    assert device.runner._num_started > 3
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


@pytest.mark.parametrize("right_rank", [0, 1])
def test_every_round_reads_the_row_of_its_last_accepted_draft(right_rank):
    """Heads that are right have all drafts of their path accepted: in the first round after a
    prompt, in the next ones, and in the host's steps between; a wrong row would give others."""
    path = (right_rank,) * 3
    tree = MedusaTree.of([(0,), (1,), (2,), (0, 1), path, (2, 1)])
    device = MedusaDevice(tree, right_rank=right_rank)
    harness = device.harness()
    generator = np.random.default_rng(right_rank)
    accepted = Counter()
    for count in (1, 3, 4, 2):
        for _ in range(count):
            prompt = tuple(generator.integers(0, VOCAB, 9).tolist())
            harness.add(Request(prompt, max_tokens=int(generator.integers(30, 60))))
            for _ in range(int(generator.integers(1, 4))):
                report = harness.step()
                drafted = report.commits[len(report.batch.context) :]
                for item, commit in zip(report.batch.generation, drafted, strict=True):
                    left = item.sequence.max_len - len(item.sequence.tokens)
                    if commit.num_drafts == tree.num_nodes and left:
                        accepted[commit.accepted] += 1
                    assert commit.num_drafts > 0 or left == 0, "a round without its drafts"
        while harness.scheduler.has_work:
            report = harness.step()
            accepted.update(
                commit.accepted
                for commit in report.commits[len(report.batch.context) :]
                if commit.num_drafts == tree.num_nodes
            )
    assert set(accepted) == {3} and accepted[3] > 30
    assert device.runner._num_started > 20
    stats = harness.loop.stats
    assert len(stats.accepted_at_position) == 3, "as deep as the tree"


def test_the_host_is_a_round_behind_although_a_tree_has_more_nodes_than_are_left():
    """What a round may add is its depth; with its nodes every round would have to be awaited."""
    device = MedusaDevice(MedusaTree(DEFAULT), agreement=0.0)
    harness = device.harness()
    harness.add(Request((1, 2, 3), max_tokens=40))
    ahead = 0
    while harness.scheduler.has_work:
        harness.step()
        ahead += len(device.runner._in_flight)
    assert ahead > 20


def test_lengths_that_change_from_round_to_round_change_no_token(fake):
    device = MedusaDevice(TREE, agreement=0.8, lengths=(0, 1, TREE.num_nodes))
    harness = device.harness(draft_lengths=Lengths((0, 1, TREE.num_nodes)))
    device.runner.prepare(4, 0)
    captured = device.capture.num_captured
    assert captured == 3 * (3 + 2)  # batches of 1, 2 and 4
    requests = [Request((3, index), max_tokens=50) for index in range(4)]
    sequences = [harness.add(request) for request in requests]
    drafted = set()
    while harness.scheduler.has_work:
        drafted |= {commit.num_drafts for commit in harness.step().commits}
    assert drafted >= {0, 1, TREE.num_nodes}
    assert device.capture.num_captured == captured
    for request, sequence in zip(requests, sequences, strict=True):
        assert sequence.tokens[2:] == fake.plain_answer(fake.Engine(), request)[0]


def test_a_failed_round_leaves_no_rows_behind(fake):
    device = MedusaDevice(TREE)
    harness = device.harness()
    harness.add(Request((1, 2, 3), max_tokens=60))
    for _ in range(4):
        harness.step()
    device.target.program.fail = RuntimeError("CUDA error: an illegal memory access")
    late = harness.add(Request((4, 5), max_tokens=20))
    with pytest.raises(Exception, match="illegal memory access"):
        harness.run()
    device.target.program.fail = None
    for victim in list(harness.scheduler.active):
        harness.cancel(victim)
    again = harness.add(replace(late.request, max_tokens=30))
    harness.run()
    assert again.tokens[2:] == fake.plain_answer(fake.Engine(), again.request)[0]


def test_rounds_are_made_unless_trees_are_accepted_at_random_or_heads_are_counted():
    device = MedusaDevice(TREE)
    loaded = SimpleNamespace(engines={"target": device.target}, sampling=None, has_rounds=True)
    opened = OpenedOnGpu(loaded, "a GPU")

    def runner_of(method, acceptance=None):
        return opened.make_round_runner(method, device.drafter, 9, acceptance, ())

    runner = runner_of(Medusa(TREE))
    assert isinstance(runner.drafter, DeviceMedusa) and runner.drafter.draft_len == 9
    assert runner_of(Medusa(TREE), SyntheticAcceptance((0.5,) * 9)) is None
    assert runner_of(Medusa(TREE, accuracy=HeadAccuracy())) is None


def test_the_memory_plan_counts_the_trees_of_heads():
    trees = DraftTrees.allocate(8, 20, "cpu")
    tensors = [trees.parents, trees.counts, trees.rows, trees.positions, trees.starts, trees.moves]
    tensors += [getattr(trees.sampling, name) for name in trees.sampling.__slots__]
    keys = [
        torch.empty(num_keys(8, num_chunks(5000), MOST_RANKS), dtype=torch.int64) for _ in range(2)
    ]
    plan = SimpleNamespace(
        head_shares=None,
        tensors=[SimpleNamespace(name=name, shape=("requests", 5000)) for name in "ab"],
        heads={"medusa": SimpleNamespace(outputs={"logits.0": "a", "logits.1": "b"})},
        head_caches={},
    )
    assert tree_bytes(plan, 8, 20) == sum(t.nbytes for t in (*tensors, *keys))
