"""The KV caches of an engine on the CPU: its own, or that of a head."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import Plan
from llmctl.errors import OutOfMemory
from llmctl.runtime.engines.engine import block_bytes, kv_cache_shape
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind


class CpuCache:
    """One of `Plan.caches`, and blocks that have left it. See BlockHolder."""

    def __init__(self, plan: Plan, name: str = "") -> None:
        self._plan = plan
        self._name = name
        self._blocks: torch.Tensor | None = None
        self._host_blocks: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The cache, once it is allocated."""
        assert self._blocks is not None, "allocate_kv_cache comes first"
        return self._blocks

    def allocate(self, num_blocks: int) -> None:
        """Zeroed. Pages are touched only when a block is first used. Raises OutOfMemory."""
        fix = "lower --max-tokens-in-paged-kv-cache or --kv-cache-free-gpu-memory-fraction"
        self._blocks = self._zeros(num_blocks, "a KV cache", fix)

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """A second pool besides the first. Raises OutOfMemory."""
        fix = "lower --kv-cache-host-memory-bytes"
        self._host_blocks = self._zeros(num_blocks, "a host tier of the KV cache", fix)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Copy in order, immediately: on a CPU host memory is the device's memory.

        By numpy, on this thread: torch would start threads of OpenMP, which then spin for a while,
        on cores that the step needs.
        """
        own = _bytes_of(self.tensor)
        pools = {CopyKind.WITHIN: (own, own)}
        if self._host_blocks is not None:
            host = _bytes_of(self._host_blocks)
            pools[CopyKind.OFFLOAD] = (own, host)
            pools[CopyKind.ONBOARD] = (host, own)
        for copy in copies:
            source, destination = pools[copy.kind]
            destination[:, copy.dst_block] = source[:, copy.src_block]
        return None

    def _zeros(self, num_blocks: int, what: str, fix: str) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self._plan.caches[self._name].dtype)
        num_bytes = num_blocks * block_bytes(self._plan, self._name)
        try:  # the kernel's zeros: torch would write its own, into every page
            pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                f"{what} of {num_blocks} blocks needs {num_bytes / 1e9:.2f} GB, which is not there",
                fix=fix,
            ) from error
        shape = kv_cache_shape(self._plan, num_blocks, self._name)
        return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def _bytes_of(blocks: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = blocks.view(torch.uint8).numpy()
    return found
