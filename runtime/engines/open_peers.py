"""Engines of several ranks with a GPU each: rank 0 plans and leads, every other rank follows on the
GPU of its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmctl.errors import RankFailure
from llmctl.plugins.backends.cpu.binding import num_threads
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import Peers
from llmctl.plugins.backends.cuda.peers import PeerMemory
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.engine import NO_WINDOWS
from llmctl.runtime.engines.engine_file import EngineFile, is_shared, slot_bytes
from llmctl.runtime.engines.open_cuda import GpuLeader, LoadedEngines, PlannedEngines
from llmctl.runtime.engines.opening import TARGET, OpenRequest, RankSide
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.commands import ROUNDS
from llmctl.runtime.ranks.launch import world_of
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.ranks.processes import RankOptions
from llmctl.runtime.rounds.following import FollowingRounds

_HANDLE = "peer_memory"  # of what a rank says of itself
_FOLLOWER_WAITS_S = 3600.0  # for another rank: rank 0 ends the run long before


class GpuRank(RankSide):
    """See RankSide."""

    def __init__(self, rank: int, size: int, folders: Mapping[str, Path]) -> None:
        torch.cuda.set_device(rank)
        self._rank = rank
        files = [_open(folder, rank) for folder in folders.values()]
        self._memory = PeerMemory(rank, size, slot_bytes(files), cuda_driver(rank))
        self.said = {_HANDLE: self._memory.handle.hex()}

    def open(
        self,
        folders: Mapping[str, Path],
        windows: WindowOptions,
        ranks: Ranks,
        said: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Engines, whose kernels exchange sums through memory that GPUs map of each other, and what
        runs rounds."""
        queue = DeviceQueue(f"cuda:{self._rank}")
        peers = self._memory.join(_handles(said), queue.device, _FOLLOWER_WAITS_S)
        files = {role: _open(each, self._rank, windows) for role, each in folders.items()}
        engines = {role: file.load(queue, peers)[0] for role, file in files.items()}
        return {**engines, ROUNDS: FollowingRounds(engines)}


def lead(
    folders: Mapping[str, Path], planned: PlannedEngines, request: OpenRequest
) -> tuple[LoadedEngines, Leader]:
    """(rank 0's engines, whose calls are those of all ranks, and the leader), all ranks opened. A
    draft engine of one rank is run by every rank alike.

    Raises what Leader and loading raise.
    """
    config = planned.files[TARGET].config
    size, limit_s = config.num_ranks, request.rank_timeout_s
    memory = PeerMemory(0, size, slot_bytes(planned.files.values()), cuda_driver(0))
    options = RankOptions(size, folders, request.windows, num_threads(), limit_s=limit_s)
    leader = Leader(options, world_of(config), {_HANDLE: memory.handle.hex()})
    try:
        said = [leader.said[rank] for rank in range(size)]
        peers = memory.join(_handles(said), torch.device("cuda", 0), limit_s)
        leader.on_loss = partial(_stop_waiting, peers)
        loaded = planned.load(GpuLeader(leader, peers, _watcher(leader, peers)))
        leader.wait_for_all("opened its engines", is_starting=True)
    except BaseException:
        leader.close()
        raise
    return loaded, leader


def _open(folder: Path, rank: int, windows: WindowOptions = NO_WINDOWS) -> EngineFile:
    return EngineFile.open(folder, windows, rank if is_shared(folder) else None)


def _handles(said: Sequence[Mapping[str, Any]]) -> list[bytes]:
    return [bytes.fromhex(each[_HANDLE]) for each in said]


def _stop_waiting(peers: Peers) -> None:
    peers.lost[0] = -1


def _watcher(leader: Leader, peers: Peers) -> Callable[[], None]:
    """Raises RankFailure once a kernel has stopped waiting for a rank: what it computed is none."""

    def watch() -> None:
        late = int(peers.lost[0])
        if late > 0:
            raise leader.explain(RankFailure(f"rank {late - 1} is late"))
        if late < 0:
            leader.require_running()

    return watch
