"""Tensor parallelism: each rank's share of the weights.

A rank's network has the model's form with fewer heads and a narrower MLP; its weights are slices of
the checkpoint's: of tensors as they are read, along rows or columns (`Shard`); of weights that are
made of several tensors, or padded, slices of the result (`ColumnShard`, `RowShard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network, Node
from llmctl.builder.ranks import local_kv_heads, require_divisible
from llmctl.builder.sources import Source, TensorReader

if TYPE_CHECKING:
    import torch

_SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_KV_ROWS = ("k_proj", "v_proj")
SPLIT_COLUMNS = ("o_proj", "down_proj")


def local_model(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """The model that one rank computes. Raises Unsupported where its parts do not divide evenly."""
    require_divisible(model, num_ranks)
    return replace(
        model,
        num_attention_heads=model.num_attention_heads // num_ranks,
        num_key_value_heads=local_kv_heads(model.num_key_value_heads, num_ranks),
        intermediate_size=model.intermediate_size // num_ranks,
    )


def reduce_partial_sums(network: Network) -> Network:
    """Insert an all_reduce after every projection whose input dimension is split over ranks.

    A bias is added to the sum, once. For TensorRT, whose plans add what has the model dtype;
    passes/ranks.py is for backends of ours.
    """
    reduced = network.copy()
    for node in network.nodes:
        if node.op != "linear" or not node.name.endswith(SPLIT_COLUMNS):
            continue
        out = network.tensors[node.outputs["out"]]
        name = f"{node.name}.partial"
        partial = reduced.add_activation(f"{name}.out", out.dtype, out.shape).name
        inputs = {role: t for role, t in node.inputs.items() if role != "bias"}
        bias = {role: t for role, t in node.inputs.items() if role == "bias"}
        product = replace(node, inputs=inputs, outputs={"out": partial})
        total = Node("all_reduce", f"{node.name}.all_reduce", {"x": partial, **bias}, node.outputs)
        reduced.replace_nodes([node], [product, total], at=node)
    return reduced


@dataclass(frozen=True, slots=True)
class Shard:
    """A checkpoint as one rank reads it. num_kv_heads: the whole model's."""

    checkpoint: TensorReader
    rank: int
    num_ranks: int
    num_kv_heads: int

    @property
    def whole(self) -> TensorReader:
        """The same checkpoint, unsliced."""
        return self.checkpoint

    def read(self, name: str) -> torch.Tensor:
        """The rank's part of a tensor."""
        tensor = self.checkpoint.read(name)
        module, _, kind = name.rpartition(".")
        axis = None
        if module.endswith(_SPLIT_ROWS):  # a scale of the whole tensor is every rank's
            is_split = kind in ("weight", "bias") or (kind == "weight_scale" and tensor.numel() > 1)
            axis = 0 if is_split else None
        elif module.endswith(SPLIT_COLUMNS) and kind == "weight":
            axis = 1
        if axis is None or self.num_ranks == 1:
            return tensor
        parts, part = self.num_ranks, self.rank
        if module.endswith(_KV_ROWS):  # several ranks may have the same head
            parts = min(parts, self.num_kv_heads)
            part = self.rank * parts // self.num_ranks
        size = tensor.shape[axis] // parts
        return tensor.narrow(axis, part * size, size).contiguous()


def shards(checkpoint: TensorReader, model: ModelConfig, num_ranks: int) -> tuple[Shard, ...]:
    """The checkpoint as each rank reads it."""
    kv_heads = model.num_key_value_heads
    return tuple(Shard(checkpoint, rank, num_ranks, kv_heads) for rank in range(num_ranks))


@dataclass(frozen=True, slots=True)
class _Part:
    """What a shard takes from its source as it is."""

    source: Source  # of the whole weight or scales

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def dtype(self) -> str:
        return self.source.dtype


@dataclass(frozen=True, slots=True)
class ColumnShard(_Part):
    """Columns of a weight that is made of several tensors, such as codes and scales of blocks:
    numbers depend on the whole row, so rows are made whole and cut. Chunks want a `Shard`."""

    columns: int  # of a rank, or blocks of a packed weight; the source has columns * ranks

    @property
    def shape(self) -> tuple[int, ...]:
        rows, _, *inner = self.source.shape
        return (rows, self.columns, *inner)

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        shard = _shard(checkpoint)
        for chunk in self.source.chunks(shard.whole):
            yield chunk.narrow(1, shard.rank * self.columns, self.columns).contiguous()


@dataclass(frozen=True, slots=True)
class RowShard(_Part):
    """A rank's rows of a weight or of its scales, padded with zeros to `rows`. Chunks want a
    `Shard`."""

    rows: int  # or tiles of a packed weight

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.source.shape[1:])

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        import torch

        shard, first, given = _shard(checkpoint), 0, 0
        start, stop = shard.rank * self.rows, (shard.rank + 1) * self.rows
        for chunk in self.source.chunks(shard.whole):
            part = chunk[max(0, start - first) : max(0, stop - first)]
            if len(part):
                given += len(part)
                yield part.contiguous()
            first += len(chunk)
        if given < self.rows:
            dtype: torch.dtype = getattr(torch, self.dtype)
            yield torch.zeros((self.rows - given, *self.shape[1:]), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Whole(_Part):
    """A weight that every rank has whole, such as a draft head's. Chunks want a `Shard`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def chunks(self, checkpoint: TensorReader) -> Iterator[torch.Tensor]:
        return self.source.chunks(_shard(checkpoint).whole)


def _shard(checkpoint: TensorReader) -> Shard:
    assert isinstance(checkpoint, Shard), "ranks differ in what this weight holds"
    return checkpoint
