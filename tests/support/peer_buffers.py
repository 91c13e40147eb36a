"""Buffers that ranks with a GPU each map of each other, in a CPU's memory, and ranks as threads."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from llmctl.plugins.ops.all_reduce.peers import TURN


class Buffers:
    """What all ranks map, and what each has for itself."""

    def __init__(self, ranks: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        each = 2 * ranks * slot_bytes // 4
        self.shared = [torch.zeros(each, dtype=torch.int32) for _ in range(ranks)]
        self.bases = torch.tensor([own.data_ptr() for own in self.shared])
        self.state = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]
        self.lost = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]

    def call(self, library: ctypes.CDLL, rank: int, x: torch.Tensor, blocks: tuple[int, int],
             arguments: list[Any], limit_ns: int) -> None:  # fmt: skip
        """blocks: of the grid, of a cluster."""
        own = [pointer(self.bases), pointer(self.state[rank]), pointer(self.lost[rank])]
        sizes = (rank, len(x), ctypes.c_longlong(self.slot_bytes), ctypes.c_longlong(limit_ns))
        library.launch(*blocks, *own, pointer(x), *arguments, *sizes)

    def require_left_empty(self, launches: int) -> None:
        """What was taken is cleared, every launch counted, and nobody was lost."""
        assert not any(own.any() for own in self.shared)
        assert [state.tolist() for state in self.state] == [[launches * TURN]] * len(self.state)
        assert not any(int(lost) for lost in self.lost)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def optional(given: dict[str, torch.Tensor], *roles: str) -> list[ctypes.c_void_p]:
    return [pointer(given[role]) if role in given else ctypes.c_void_p() for role in roles]


def run_ranks(bodies: list[Any]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN it is."""
    is_nan = wanted.isnan()
    alike = found.view(torch.uint8) == wanted.view(torch.uint8)
    values = alike.view(*wanted.shape, wanted.element_size()).all(dim=-1)
    return bool((found.isnan() == is_nan).all() and (values | is_nan).all())
