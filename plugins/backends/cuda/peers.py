"""Memory that ranks with a GPU each map of each other, by handles of CUDA IPC."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmctl.errors import DeviceFailure, Unsupported
from llmctl.plugins.backends.cuda.driver import CudaDriver
from llmctl.plugins.backends.cuda.kernel_spec import Peers
from llmctl.plugins.ops.all_reduce.peers import buffer_bytes


class PeerMemory:
    """One rank's buffer, and those of the others once `join` has mapped them. It is freed with the
    process."""

    def __init__(self, rank: int, num_ranks: int, slot_bytes: int, driver: CudaDriver) -> None:
        """Raises OutOfMemory, DeviceFailure."""
        self._rank, self._num_ranks = rank, num_ranks
        self._slot_bytes = -(-slot_bytes // 16) * 16
        self._driver = driver
        driver.make_current()
        self._address = driver.allocate(buffer_bytes(num_ranks, self._slot_bytes))
        self.handle = driver.handle_of(self._address)  # for the other processes

    def join(self, handles: Sequence[bytes], device: torch.device, limit_s: float) -> Peers:
        """Map the buffers of all ranks, whose handles these are in order. limit_s: how long a
        launch waits for a rank. Raises Unsupported where a device cannot be reached."""
        self._driver.make_current()
        assert len(handles) == self._num_ranks and handles[self._rank] == self.handle
        bases = [
            self._address if rank == self._rank else self._open(rank, handle)
            for rank, handle in enumerate(handles)
        ]
        state = torch.zeros(4, dtype=torch.int32, device=device)
        table = torch.tensor(bases, dtype=torch.int64).to(device)
        torch.cuda.synchronize(device)
        return Peers(
            rank=self._rank,
            num_ranks=self._num_ranks,
            bases=table,
            state=state,
            lost=torch.zeros(4, dtype=torch.int32, pin_memory=True),
            slot_bytes=self._slot_bytes,
            limit_ns=int(limit_s * 1e9),
        )

    def _open(self, rank: int, handle: bytes) -> int:
        try:
            return self._driver.open_handle(handle)
        except DeviceFailure as error:
            raise Unsupported(
                f"the memory of rank {rank}'s GPU cannot be mapped: {error}",
                fix="run on GPUs that reach each other (nvidia-smi topo -p2p r), or all ranks on "
                "one: --ranks-on-one-device",
            ) from error
