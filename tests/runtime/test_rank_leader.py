"""What rank 0 hears of the others, here of a rank 1 that is a thread."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmctl.errors import RankFailure
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks import processes
from llmctl.runtime.ranks.channel import Channel, connect
from llmctl.runtime.ranks.identity import identity
from llmctl.runtime.ranks.launch import World, address_of
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.ranks.processes import Followers, RankOptions

JOB = f"test-leader-{os.getpid()}"


@pytest.fixture(params=[0, 1100], ids=["few files", "more than 1024 files"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Leader, Channel]]:
    """Rank 0, and rank 1's channel to it, beside so many open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(limits[1], 4096) if limits[1] >= 0 else 4096
    if most < request.param + 100:
        pytest.skip(f"a process may open {most} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], most), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(request.param)]
    found: list[Channel] = []

    def join() -> None:
        channel = connect(address_of(JOB), 20)
        assert channel is not None
        channel.send(identity(1, 2, {}))
        _, (segment,) = channel.receive_file(20)
        os.close(segment)
        found.append(channel)

    other = threading.Thread(target=join)
    other.start()
    leader = Leader(RankOptions(2, {}, WindowOptions(), 1, 20.0), World("a test", 0, 2, JOB))
    other.join()
    yield leader, found[0]
    leader.close()
    found[0].close()
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_messages_that_come_together_are_all_heard(pair: tuple[Leader, Channel]) -> None:
    leader, channel = pair
    channel.connection.sendall(b'{"done": "one"}\n{"done": "another"}\n')
    leader.wait_for_all("done the one")
    leader.wait_for_all("done the other")
    leader.options = replace(leader.options, limit_s=0.3)  # of the wait that is in vain
    with pytest.raises(RankFailure, match="rank 1 .* has not done a third for 0.3 s"):
        leader.wait_for_all("done a third")


def test_the_end_of_a_rank_is_heard(pair: tuple[Leader, Channel]) -> None:
    leader, channel = pair
    channel.close()
    with pytest.raises(RankFailure, match="rank 1 .* has ended"):
        leader.wait_for_all("done anything")


def test_a_run_that_ends_does_not_wait_for_ranks_that_are_still_importing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "END_S", 40.0)
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(words) as process:
        began = time.monotonic()
        Followers(processes={1: process}).end()
        assert time.monotonic() - began < 20
    assert process.returncode == -signal.SIGKILL
