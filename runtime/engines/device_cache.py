"""The paged KV caches of an engine on a GPU: its own, or that of a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmctl.builder.engine_format import Plan
from llmctl.errors import OutOfMemory
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.runtime.engines.engine import block_bytes, kv_cache_shape
from llmctl.runtime.engines.host_blocks import HostBlocks
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind


class DeviceCache:
    """One of `Plan.caches`, and its blocks in host memory. See BlockHolder."""

    def __init__(self, queue: DeviceQueue, plan: Plan, name: str = "") -> None:
        self._queue = queue
        self._plan = plan
        self._name = name
        self._blocks: torch.Tensor | None = None
        self._host_blocks: HostBlocks | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The cache, once it is allocated."""
        assert self._blocks is not None, "allocate_kv_cache comes first"
        return self._blocks

    def settle(self) -> None:
        """From here on no transfer of former users is in flight."""
        if self._host_blocks is not None:
            self._host_blocks.settle()

    def is_allocated(self, num_blocks: int) -> bool:
        """Whether there is a cache of that size."""
        shape = kv_cache_shape(self._plan, num_blocks, self._name)
        return self._blocks is not None and tuple(self._blocks.shape) == shape

    def free(self) -> None:
        """Give the memory back."""
        self._blocks = None

    def allocate(self, num_blocks: int) -> None:
        """Zeros, because a masked key is still multiplied by its value: NaN there would spread.
        Raises OutOfMemory."""
        dtype: torch.dtype = getattr(torch, self._plan.caches[self._name].dtype)
        num_bytes = num_blocks * block_bytes(self._plan, self._name)
        try:
            with device_errors("allocating the KV cache"), self._queue.scope():
                raw = torch.zeros(num_bytes, dtype=torch.uint8, device=self._queue.device)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"a KV cache of {num_blocks} blocks needs {num_bytes / 1e9:.2f} GB of device "
                "memory, which is not there",
                fix="lower --kv-cache-free-gpu-memory-fraction",
            ) from error
        self._blocks = raw.view(dtype).view(kv_cache_shape(self._plan, num_blocks, self._name))

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers, after everything enqueued before."""
        blocks = self.tensor.view(torch.uint8)
        with device_errors("copying a KV block"), self._queue.scope():
            blocks[:, destination].copy_(blocks[:, source])

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """Pinned host memory for blocks that leave the device; existing memory of that size is
        kept. Raises OutOfMemory."""
        if self._host_blocks is not None and self._host_blocks.num_blocks == num_blocks:
            return  # pinning takes a while
        layers = self._plan.caches[self._name].num_layers
        layer_bytes = block_bytes(self._plan, self._name) // layers
        self._host_blocks = None
        self._host_blocks = HostBlocks(self._queue, num_blocks, layers, layer_bytes)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Start copies in order, after everything enqueued before; does not wait."""
        if self._host_blocks is not None:
            layers, num_blocks = self.tensor.shape[:2]
            blocks = self.tensor.view(torch.uint8).view(layers, num_blocks, -1)
            return self._host_blocks.copy(blocks, copies)
        for copy in copies:
            assert copy.kind is CopyKind.WITHIN, "allocate_host_blocks comes first"
            self.copy_block(copy.src_block, copy.dst_block)
        return None
