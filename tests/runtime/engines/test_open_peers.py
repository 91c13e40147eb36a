"""How ranks with a GPU each find each other, here with rank 1 as a thread and without GPUs: whose
memory is mapped by whom, what a lost rank means for kernels that wait, and nested calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmctl.errors import RankFailure
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines import open_peers
from llmctl.runtime.engines.open_peers import GpuRank, lead
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.channel import Channel, connect
from llmctl.runtime.ranks.commands import ROUNDS, Command
from llmctl.runtime.ranks.identity import identity
from llmctl.runtime.ranks.launch import World, address_of
from llmctl.runtime.rounds.following import FollowingRounds

JOB = f"test-peers-{os.getpid()}"
SLOT_BYTES = 4096


class FakeMemory:
    """A buffer whose handle names its rank, and who has mapped what."""

    joined: dict[int, tuple[list[bytes], float]] = {}

    def __init__(self, rank: int, num_ranks: int, slot_bytes: int, driver: object) -> None:
        assert (num_ranks, slot_bytes) == (2, SLOT_BYTES)
        self.rank, self.handle = rank, bytes([rank + 1]) * 64

    def join(self, handles: list[bytes], device: torch.device, limit_s: float) -> Any:
        self.joined[self.rank] = (handles, limit_s)
        return SimpleNamespace(lost=torch.zeros(4, dtype=torch.int32))


class FakeFile:
    """An engine file that loads nothing."""

    def __init__(self, rank: int | None) -> None:
        self.rank, self.config = rank, SimpleNamespace(num_ranks=2)

    def load(self, queue: DeviceQueue, peers: object) -> tuple[str, None]:
        return f"engine of rank {self.rank}", None


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A target of two ranks and a draft of one; no GPU is asked for anything."""
    found = {}
    for role in ("target", "draft"):
        found[role] = tmp_path / role
        found[role].mkdir()
        (found[role] / "config.json").write_text("{}")
    FakeMemory.joined = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(open_peers, "PeerMemory", FakeMemory)
    monkeypatch.setattr(open_peers, "cuda_driver", lambda device: None)
    monkeypatch.setattr(open_peers, "slot_bytes", lambda files: SLOT_BYTES)
    monkeypatch.setattr(open_peers, "is_shared", lambda folder: folder.name == "target")
    monkeypatch.setattr(open_peers, "DeviceQueue", lambda device: DeviceQueue("cpu"))
    opened = SimpleNamespace(open=lambda folder, windows, rank: FakeFile(rank))
    monkeypatch.setattr(open_peers, "EngineFile", opened)
    return found


def planned() -> Any:
    def load(leader: Any) -> Any:
        return SimpleNamespace(leader=leader)

    return SimpleNamespace(files={"target": FakeFile(0)}, load=load)


def request(**rest: Any) -> Any:
    fields = {"rank_timeout_s": 3.0, "windows": WindowOptions()}
    return SimpleNamespace(**{**fields, **rest})


@pytest.fixture
def joined(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(rank 0's engines, the leader, rank 1's engines, its channel)."""
    monkeypatch.setattr(open_peers, "world_of", lambda config: World("a test", 0, 2, JOB))
    found: list[Any] = []

    def follow() -> None:
        side = GpuRank(1, 2, folders)
        channel = connect(address_of(JOB), 20)
        assert channel is not None
        channel.send({**side.said, **identity(1, 2, folders)})
        message, (segment,) = channel.receive_file(20)
        os.close(segment)
        assert message is not None
        ranks: Any = None
        found.extend((side.open(folders, WindowOptions(), ranks, message["said"]), channel))
        channel.send({"done": "open"})

    other = threading.Thread(target=follow)
    other.start()
    loaded, leader = lead(folders, planned(), request())
    other.join()
    yield loaded, leader, *found
    leader.close()
    found[1].close()


def test_every_rank_maps_the_memory_of_all_in_one_order(joined: Any) -> None:
    loaded, leader, engines, _ = joined
    handles = [b"\1" * 64, b"\2" * 64]
    assert FakeMemory.joined == {0: (handles, 3.0), 1: (handles, 3600.0)}
    assert engines["target"] == "engine of rank 1"
    assert engines["draft"] == "engine of rank None", "whole on every rank"
    assert isinstance(engines[ROUNDS], FollowingRounds)
    assert loaded.leader.ranks is leader


def test_kernels_stop_waiting_for_a_rank_that_has_ended(joined: Any) -> None:
    loaded, leader, _, channel = joined
    loaded.leader.watch()  # nothing has happened
    assert isinstance(channel, Channel)
    channel.close()
    with pytest.raises(RankFailure, match="rank 1 .* has ended"):
        leader.wait_for_all("done anything")
    lost = loaded.leader.peers.lost
    while not int(lost[0]):  # the thread that heard it is about to say so
        pass
    assert int(lost[0]) == -1
    with pytest.raises(RankFailure, match="rank 1 .* has ended"):
        loaded.leader.watch()


def test_a_rank_that_a_kernel_waited_for_too_long_is_named(joined: Any) -> None:
    loaded, leader, _, _ = joined
    loaded.leader.peers.lost[0] = 2
    with pytest.raises(RankFailure, match=r"rank 1 .* has not come for 3 s: it hangs"):
        loaded.leader.watch()
    with pytest.raises(RankFailure, match="has not come for 3 s"):
        leader.command(Command("target", "run"))


def test_calls_within_a_led_call_are_not_handed_on(joined: Any) -> None:
    _, leader, _, _ = joined
    given: list[Command] = []
    leader.command = given.append
    outer, inner = Command(ROUNDS, "prepare"), Command("target", "prepare_prompts", 3)
    assert leader.lead(outer, lambda: leader.lead(inner, lambda: 5)) == 5
    assert given == [outer]
    assert leader.lead(inner, lambda: 6) == 6 and given == [outer, inner]
