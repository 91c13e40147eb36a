"""Acceptance drawn at random: its rates on the host and on a device, and vLLM's two options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmctl.errors import BadConfig
from llmctl.plugins.device_loop import reference
from llmctl.plugins.device_loop.state import RECORD_ACCEPTED, RoundState
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.generate.synthetic_acceptance import (
    FORCE_LAUNCHES,
    DeviceAcceptanceDraws,
    SyntheticAcceptance,
    SyntheticDrafter,
)
from llmctl.runtime.request import Request, Sequence

RATES = (0.9, 0.6, 0.6, 0.1)


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(1, 1, Request(tuple(tokens), 100), 0, list(tokens), len(tokens), 1000)


def test_lots_have_the_rates_whatever_the_length_and_last_token():
    acceptance = SyntheticAcceptance(RATES, seed=3)
    drawn = np.array(
        [acceptance.accepted(sequence_of([0] * n + [t])) for n in range(200) for t in range(100)]
    )
    for position, rate in enumerate(RATES):
        assert np.mean(drawn > position) == pytest.approx(rate, abs=0.015)
    assert acceptance.length == pytest.approx(1 + sum(RATES))


def test_a_length_gives_whole_drafts_first_then_a_fraction_then_none():
    assert SyntheticAcceptance.from_length(3.51, 5).rates == pytest.approx((1, 1, 0.51, 0, 0))
    assert SyntheticAcceptance.from_length(1, 2).rates == (0, 0)
    assert SyntheticAcceptance.from_length(3, 2).rates == (1, 1)


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.1,), (-0.1,), (float("nan"),)])
def test_rates_that_cannot_be_are_refused(rates):
    with pytest.raises(BadConfig, match="synthetic acceptance rates"):
        SyntheticAcceptance(rates)


@pytest.mark.parametrize("length", [0.9, 5.1])
def test_a_length_beyond_the_drafts_is_refused(length):
    with pytest.raises(BadConfig, match="must be in \\[1, 5\\]"):
        SyntheticAcceptance.from_length(length, 4)


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_rounds_accept_drafts_at_random_whatever_the_target_says(fake, agreement):
    acceptance = SyntheticAcceptance(RATES)
    drafter = DraftEngineDrafter(fake.Engine(agreement=agreement), len(RATES))
    config = ExecutorConfig(
        KvCacheConfig(200), check_invariants=True, iter_stats_max_iterations=10_000
    )
    target = fake.Engine(max_draft_len=len(RATES))
    with Executor(
        target, SyntheticDrafter(drafter, acceptance), config, ReferenceSampling()
    ) as executor:
        requests = [Request((n % 23, 3, 1, n // 23), 80) for n in range(30)]
        for number in executor.enqueue_requests(requests):
            (response,) = executor.await_responses(number, timeout_s=60)
            assert len(response.result.output_token_ids) == 80
        steps = executor.get_latest_iteration_stats()
    rounds = [item for step in steps for item in step.rounds]
    full = [r.num_accepted_tokens for r in rounds if r.num_draft_tokens == len(RATES)]
    assert len(full) > 400  # the last rounds of an output draft less
    for position, rate in enumerate(RATES):
        assert np.mean(np.array(full) > position) == pytest.approx(rate, abs=0.05)


def test_the_memory_plan_counts_the_kernels_that_force_acceptance():
    class Count(TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.num_ops += 1  # views too, which launch nothing
            return func(*args, **(kwargs or {}))

    state = RoundState.allocate(8, 4, "cpu")
    draws = DeviceAcceptanceDraws(SyntheticAcceptance(RATES, seed=5), "cpu")
    with Count():
        draws.force(state, 8, 4)
    assert 10 < Count.num_ops <= FORCE_LAUNCHES


@pytest.mark.parametrize("agrees", [True, False])
def test_a_device_draws_the_acceptance_that_the_host_would(agrees):
    batch, draft_len = 8, 4
    acceptance = SyntheticAcceptance(RATES, seed=5)
    generator = np.random.default_rng(0)
    state = RoundState.allocate(batch, draft_len, "cpu")
    draws = DeviceAcceptanceDraws(acceptance, "cpu")
    for _ in range(30):
        lengths = generator.integers(2, 500, batch)
        roots = generator.integers(0, 50, batch)
        drafts = generator.integers(0, 3, (batch, draft_len))
        targets = generator.integers(0, 3, (batch, draft_len + 1))
        if agrees:
            targets[:, :-1] = drafts
        state.committed.copy_(torch.from_numpy(lengths))
        state.root.copy_(torch.from_numpy(roots))
        state.max_len.fill_(10_000)
        state.drafts.copy_(torch.from_numpy(drafts))
        state.targets.copy_(torch.from_numpy(targets.reshape(-1)))
        slot = int(state.counter) % len(state.ring)
        draws.force(state, batch, draft_len)
        reference.accept(state, batch, draft_len)
        wanted = [
            acceptance.accepted(sequence_of([0] * (n - 1) + [int(root)]))
            for n, root in zip(lengths, roots, strict=True)
        ]
        assert state.ring[slot, :, RECORD_ACCEPTED].tolist() == wanted
