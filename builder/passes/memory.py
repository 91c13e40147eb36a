"""Place activations in one arena: tensors share bytes if their lifetimes do not overlap.

Largest first, each at the lowest offset that is free during its lifetime. A residual sum made by
rms_norm, which works in place, uses the bytes of its input residual. One made by a product with a
norm does not, because its thread blocks all read the residual while one writes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.builder.network import Network

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4}


@dataclass(slots=True)
class _Buffer:
    names: list[str]
    num_bytes: int
    first: int  # index of the node that writes it first
    last: int  # index of the last node that reads it


def plan_memory(
    network: Network, max_num_tokens: int, max_num_rows: int, alignment: int
) -> tuple[dict[str, int], int]:
    """(offset of every activation, a multiple of `alignment`; bytes of the arena)."""
    rows = {"tokens": max_num_tokens, "rows": max_num_rows}
    placed: list[tuple[int, _Buffer]] = []
    offsets: dict[str, int] = {}
    for buffer in sorted(_buffers(network, rows, alignment), key=lambda b: (-b.num_bytes, b.first)):
        meeting = sorted(
            (offset, offset + other.num_bytes)
            for offset, other in placed
            if other.first <= buffer.last and buffer.first <= other.last
        )
        offset = 0
        for start, end in meeting:
            if offset + buffer.num_bytes <= start:
                break
            offset = max(offset, end)
        placed.append((offset, buffer))
        offsets.update(dict.fromkeys(buffer.names, offset))
    return offsets, max(offset + buffer.num_bytes for offset, buffer in placed)


def _buffers(network: Network, rows: Mapping[str, int], alignment: int) -> list[_Buffer]:
    last_read = {found.tensor: len(network.nodes) for found in network.outputs.values()}
    for index, node in enumerate(network.nodes):
        last_read.update({t: max(index, last_read.get(t, 0)) for t in node.inputs.values()})
    buffers: dict[str, _Buffer] = {}
    for index, node in enumerate(network.nodes):
        for role, name in node.outputs.items():
            last = last_read.get(name, index)
            residual = node.inputs.get("residual", "")
            if node.op == "rms_norm" and role == "residual_out" and last_read[residual] == index:
                buffers[name] = buffers[residual]
                buffers[name].names.append(name)
                buffers[name].last = last
                continue
            tensor = network.tensors[name]
            shape = [rows[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
            num_bytes = math.prod(shape) * ITEM_BYTES[tensor.dtype]
            aligned = -(-num_bytes // alignment) * alignment
            buffers[name] = _Buffer([name], aligned, index, last)
    return list({id(buffer): buffer for buffer in buffers.values()}.values())
