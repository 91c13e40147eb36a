"""Writing safetensors shards whose contents arrive in pieces.

Names, dtypes and shapes are known before the first byte, so headers are written first and each
tensor goes straight to its place: nothing is buffered, whatever the shard size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from llmctl.quantize.checkpoint import DTYPES
from llmctl.quantize.format import INDEX_FILE, SINGLE_FILE, dump_json

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to be written. dtype is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: its header and where each tensor's data starts in it."""

    file_name: str
    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def plan_shards(
    tensors: Iterable[TensorPlan], max_shard_bytes: int, single_file: str = SINGLE_FILE
) -> list[ShardPlan]:
    """Cut the tensors, in order, into files of at most `max_shard_bytes` of data each.

    A tensor larger than that gets a file of its own. `single_file`: the name where one is enough.
    """
    groups: list[list[TensorPlan]] = []
    room = -1
    for tensor in tensors:
        if tensor.num_bytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    count = len(groups)
    if count == 1:
        return [_plan_shard(single_file, groups[0])]
    return [
        _plan_shard(f"model-{i:05d}-of-{count:05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    ]


def _plan_shard(file_name: str, tensors: list[TensorPlan]) -> ShardPlan:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    # Widest elements first, so that every tensor is aligned for readers that map the file.
    for tensor in sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype][1]):
        starts[tensor.name] = end
        end += tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    offsets = {name: data + start for name, start in starts.items()}
    return ShardPlan(file_name, len(text).to_bytes(8, "little") + text, offsets, data + end)


@dataclass(slots=True)
class ShardWriter:
    """Open shard files of one checkpoint. Use as a context manager; the end checks completeness."""

    folder: Path
    shards: list[ShardPlan]
    _where: dict[str, ShardPlan] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict)
    _written: set[str] = field(default_factory=set)

    def __enter__(self) -> ShardWriter:
        self._where = {name: shard for shard in self.shards for name in shard.offsets}
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor where the plan has it."""
        import torch

        shard = self._where[name]
        data = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data
        assert name not in self._written, f"{name} written twice"
        _write_at(self._open(shard), data, shard.offsets[name])
        self._written.add(name)
        if self._written.issuperset(shard.offsets):
            os.close(self._files.pop(shard.file_name))

    def _open(self, shard: ShardPlan) -> int:
        if shard.file_name not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(self.folder / shard.file_name, flags, 0o644)
            self._files[shard.file_name] = descriptor
            _write_at(descriptor, memoryview(shard.header), 0)
        return self._files[shard.file_name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        if kind is None:
            missing = self._where.keys() - self._written
            assert not missing, f"planned but not written: {sorted(missing)[:4]}"
            self._write_index()

    def _write_index(self) -> None:
        if len(self.shards) == 1:
            return
        data_bytes = sum(shard.num_bytes - len(shard.header) for shard in self.shards)
        weight_map = {name: shard.file_name for name, shard in sorted(self._where.items())}
        index = {"metadata": {"total_size": data_bytes}, "weight_map": weight_map}
        (self.folder / INDEX_FILE).write_text(dump_json(index), encoding="utf-8")


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of it: one call writes at most 2 GiB on Linux, and less on a disk that is nearly full."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
