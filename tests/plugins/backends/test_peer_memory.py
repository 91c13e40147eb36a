"""Memory that ranks map of each other, with a driver that notes what it is asked."""

from __future__ import annotations

import pytest
import torch

from llmctl.errors import DeviceFailure, Unsupported
from llmctl.plugins.backends.cuda.peers import PeerMemory
from llmctl.plugins.ops.all_reduce.peers import buffer_bytes

OWN = 0x7000


class FakeDriver:
    """Whose device reaches no other."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def make_current(self) -> None:
        pass

    def allocate(self, num_bytes: int) -> int:
        self.allocated.append(num_bytes)
        return OWN

    def handle_of(self, address: int) -> bytes:
        assert address == OWN
        return b"own".ljust(64)

    def open_handle(self, handle: bytes) -> int:
        raise DeviceFailure("peer access is not supported between these two devices")


def test_a_buffer_has_two_slots_for_each_rank_in_whole_pages() -> None:
    driver = FakeDriver()
    PeerMemory(0, 4, 1000, driver)  # of whole vectors of 16 bytes
    assert driver.allocated == [buffer_bytes(4, 1008)] == [2 << 20]


def test_memory_that_cannot_be_reached_is_named_by_rank() -> None:
    memory = PeerMemory(0, 2, 1024, FakeDriver())
    handles = [memory.handle, b"other".ljust(64)]
    with pytest.raises(Unsupported, match="rank 1's GPU cannot be mapped: peer access") as told:
        memory.join(handles, torch.device("cuda"), 1.0)
    assert "nvidia-smi topo -p2p r" in told.value.fix and "--ranks-on-one-device" in told.value.fix
