"""The processes of other ranks, as rank 0 has them: those it started, and a channel to each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.channel import Channel
from llmctl.runtime.ranks.launch import OWN

_FOLLOWER = "llmctl.runtime.ranks.follower"
END_S = 5.0  # that a follower has to end once it is told to; then it is killed


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What followers do as rank 0 does it. folders: of the engines that they have a part of."""

    size: int
    folders: Mapping[str, Path]
    windows: WindowOptions
    num_threads: int
    limit_s: float  # how long a rank waits for another


@dataclass(slots=True)
class Followers:
    """What is to be ended, whatever happens."""

    channels: dict[int, Channel] = field(default_factory=dict)  # by rank
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # started here

    def end(self) -> None:
        """Close every channel, which followers take as the end; kill those that stay. One that has
        no channel yet, as it is still importing, hears nothing and has nothing to clean up."""
        for channel in self.channels.values():
            channel.close()
        for rank, process in self.processes.items():
            if rank not in self.channels:
                process.kill()
        end = time.monotonic() + END_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def pid(self, rank: int) -> int:
        """Of a rank's process."""
        process = self.processes.get(rank)
        return process.pid if process is not None else self.channels[rank].peer[0]


def start_rank(rank: int, job: str, options: RankOptions) -> subprocess.Popen[bytes]:
    """A follower. It is no member of the terminal's foreground job: Ctrl-C is rank 0's to handle,
    and its end is what followers hear."""
    environment = {**os.environ, **dict(zip(OWN, (str(rank), str(options.size), job), strict=True))}
    folders = [f"{role}={folder.absolute()}" for role, folder in options.folders.items()]
    return subprocess.Popen(
        # -P: what lies in the current folder, perhaps a stranger's engine, is not imported.
        [sys.executable, "-P", "-m", _FOLLOWER, str(options.limit_s), *folders],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )


def ending_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words."""
    code = process.poll()
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
