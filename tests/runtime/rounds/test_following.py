"""Rounds of several ranks on devices made of fakes: another rank drafts, verifies and accepts what
rank 0 does, from commands alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cuda import FakeCapture
from support.cuda_rounds import DRAFT_LEN, Device, Lengths, make_request
from support.other_rank import OtherRank

from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import NeverReads
from llmctl.runtime.ranks.commands import ROUNDS, Command
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.following import FollowingRounds, LeadingRounds, describe


def led(name: str) -> Callable[[Led, Any], Any]:
    """A call of an engine that the other rank makes, too."""

    def call(self: Led, argument: Any) -> Any:
        own = getattr(self.engine, name)
        return self.leader.lead(Command(self.role, name, argument), lambda: own(argument))

    return call


class Led:
    """A fake engine whose calls are another rank's, too, as LeadingCudaEngine has it."""

    def __init__(self, engine: Any, leader: OtherRank, role: str) -> None:
        self.__dict__.update(engine=engine, leader=leader, role=role)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    run, feed, compact = led("run"), led("feed"), led("compact")
    copy_blocks, allocate_kv_cache = led("copy_blocks"), led("allocate_kv_cache")


@pytest.mark.parametrize("with_draft", [True, False])
def test_another_rank_has_the_records_and_caches_of_rank_0(
    fake: Any, make_engine: Any, with_draft: bool
) -> None:
    ours, theirs = Device(make_engine, with_draft), Device(make_engine, with_draft)
    pairs = {"target": (ours.target, theirs.target)}
    if with_draft:
        pairs["draft"] = (ours.draft, theirs.draft)
    following = FollowingRounds({role: each[1] for role, each in pairs.items()}, FakeCapture())
    leader = OtherRank({ROUNDS: following} | {role: each[1] for role, each in pairs.items()})
    led = {role: Led(own, leader, role) for role, (own, _) in pairs.items()}
    drafter, on_device = ours.drafter, ours.runner.drafter
    if with_draft:
        drafter = DraftEngineDrafter(led["draft"], DRAFT_LEN)
        on_device = DeviceDraftEngine(led["draft"], DRAFT_LEN)
    own = CudaRoundRunner(led["target"], on_device, ours.capture)
    described = describe(on_device)
    assert described is not None
    runner = LeadingRounds(leader, own, described, ())
    lengths = Lengths() if with_draft else None
    draft = led.get("draft")
    harness = fake.Harness(
        led["target"], drafter, draft=draft, runner=runner, draft_lengths=lengths
    )
    other = following._own
    for length in (30, 35):
        requests = [make_request(index, length + index) for index in range(4)]
        sequences = [harness.add(request) for request in requests]
        harness.run()
        for request, sequence in zip(requests, sequences, strict=True):
            wanted, _ = fake.plain_answer(fake.Engine(), request)
            assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
        while harness.loop.prepare_more():  # while there are no requests
            assert own.num_captured == other.num_captured
        assert set(own._verify_graphs._graphs) == set(other._verify_graphs._graphs)
    assert own._num_started == other._num_started > 5 and not other._in_flight
    assert np.array_equal(own._ring, other._ring) and own._ring.any()
    for first, second in pairs.values():
        assert np.array_equal(first.cache, second.cache)
    assert ("feed" in leader.calls) == with_draft, "what a draft lacks after rounds without it"


def test_drafters_whose_state_rank_0_alone_has_are_not_followed() -> None:
    class Other(NeverReads):
        pass

    assert describe(Other()) is None  # type: ignore[arg-type]  # all that it is asked is its type
