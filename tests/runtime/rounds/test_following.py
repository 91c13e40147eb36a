"""Rounds of several ranks on devices made of fakes: another rank drafts, verifies and accepts what
rank 0 does, from commands alone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cuda import FakeCapture
from support.cuda_rounds import DRAFT_LEN, Device, Lengths, make_request
from support.other_rank import OtherRank

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime import drafting
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import FollowedDrafter, OnRank0
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.drafting.methods import follow
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.drafting.redrafter.device import DeviceReDrafter
from llmctl.runtime.drafting.redrafter.drafter import BeamShape
from llmctl.runtime.ranks.commands import ROUNDS, Command
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.following import FollowingRounds, LeadingRounds


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
    runner = LeadingRounds(leader, own, on_device, ())
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


def device_drafters() -> set[type]:
    """Every class of the drafters of device rounds."""
    folder = Path(drafting.__path__[0])
    found: set[type] = set()
    for path in sorted(folder.glob("*/device*.py")):
        name = f"{drafting.__name__}.{path.parent.name}.{path.stem}"
        module = importlib.import_module(name)
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == name and hasattr(each, "can_draft"):
                found.add(each)
    return found


ENGINES: Any = {  # of which drafters ask this much before they are bound
    "target": SimpleNamespace(
        head_output=lambda graph, name: None, shared_logits=lambda graph, names: None
    ),
    "draft": SimpleNamespace(max_num_tokens=64),
}
FOLLOWED: list[FollowedDrafter] = [
    NoDeviceDrafter(),
    DeviceDraftEngine(ENGINES["draft"], 3),
    DeviceMedusa(ENGINES["target"], MedusaTree(((0,), (1,), (0, 0))), 2, HiddenRows()),
    DeviceReDrafter(*(ENGINES["target"], BeamShape(3, 4), BeamShape(3, 2, True)), 5, HiddenRows()),
]


@pytest.mark.parametrize("drafter", FOLLOWED, ids=lambda drafter: type(drafter).__name__)
def test_another_rank_makes_the_same_drafter_of_what_one_says_of_itself(drafter) -> None:
    said = json.loads(json.dumps(drafter.describe()))
    made = follow(said, ENGINES)
    assert type(made) is type(drafter) and drafter.followed() is drafter
    assert json.loads(json.dumps(made.describe())) == said
    assert made.draft_len == drafter.draft_len


def test_every_other_drafter_says_that_rank_0_alone_has_its_state() -> None:
    alone = {each for each in device_drafters() if issubclass(each, OnRank0)}
    assert alone == device_drafters() - {type(each) for each in FOLLOWED}
    assert {each.__name__ for each in alone} > {"DeviceEagle", "DeviceLookahead"}
