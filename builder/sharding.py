"""Tensor parallelism: each rank's share of the weights, and the sums over ranks.

A rank computes some of the heads and part of the MLP's intermediate dimension, so it is a model of
the same form with fewer of both; its weights are slices of the checkpoint's. The projections back
to the hidden dimension give partial sums, which are added over the ranks. Embedding, norms and head
are replicated on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network, Node
from llmctl.builder.sources import TensorReader
from llmctl.errors import Unsupported

if TYPE_CHECKING:
    import torch

_SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_SPLIT_COLUMNS = ("o_proj", "down_proj")


def local_model(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """The model that one rank computes. Raises Unsupported where its parts do not divide evenly."""
    parts = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in parts:
        if getattr(model, name) % num_ranks:
            raise Unsupported(
                f"--tp-size {num_ranks}: the model's {name} is {getattr(model, name)}, which does "
                "not divide evenly; heads and widths are not repeated on several ranks",
                fix="a tp_size that divides the heads, the KV heads and the intermediate size",
            )
    return replace(model, **{name: getattr(model, name) // num_ranks for name in parts})


def reduce_partial_sums(network: Network) -> Network:
    """Insert an all_reduce after every projection whose input dimension is split over ranks.

    A bias is added to the sum, once.
    """
    reduced = network.copy()
    for node in network.nodes:
        if node.op != "linear" or not node.name.endswith(_SPLIT_COLUMNS):
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
    """A checkpoint as one rank reads it."""

    checkpoint: TensorReader
    rank: int
    num_ranks: int

    def read(self, name: str) -> torch.Tensor:
        """The rank's part of a tensor."""
        tensor = self.checkpoint.read(name)
        module, _, kind = name.rpartition(".")
        axis = None
        if module.endswith(_SPLIT_ROWS):  # a scale of the whole tensor is every rank's
            is_split = kind in ("weight", "bias") or (kind == "weight_scale" and tensor.numel() > 1)
            axis = 0 if is_split else None
        elif module.endswith(_SPLIT_COLUMNS) and kind == "weight":
            axis = 1
        if axis is None or self.num_ranks == 1:
            return tensor
        size = tensor.shape[axis] // self.num_ranks
        return tensor.narrow(axis, self.rank * size, size).contiguous()
