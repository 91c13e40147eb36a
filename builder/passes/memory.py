"""Place activations in one arena: tensors share bytes if their lifetimes do not overlap.

Largest first, each at the lowest offset that is free during its lifetime. A residual sum made by
rms_norm, which works in place, uses the bytes of its input residual. One made by a product with a
norm does not, because its thread blocks all read the residual while one writes the sum; nor does
one that a head is run for, whose bytes nothing else may have.

Heads run after the base graph, any number of times in any order, until the base graph runs again:
their inputs and outputs, and the outputs of the base graph, are alive all that time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    network: Network,
    max_num_tokens: int,
    max_num_rows: int,
    alignment: int,
    heads: Sequence[Network] = (),
    max_num_requests: int = 0,
    max_num_beams: int = 0,
) -> tuple[dict[str, int], int]:
    """(offset of every activation, a multiple of `alignment`; bytes of the arena)."""
    rows = {
        "tokens": max_num_tokens,
        "rows": max_num_rows,
        "requests": max_num_requests,
        "beams": max_num_beams,
    }
    placed: list[tuple[int, _Buffer]] = []
    offsets: dict[str, int] = {}
    for buffer in sorted(
        _buffers(network, heads, rows, alignment), key=lambda b: (-b.num_bytes, b.first)
    ):
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


def _buffers(
    network: Network, heads: Sequence[Network], rows: Mapping[str, int], alignment: int
) -> list[_Buffer]:
    nodes = [node for graph in (network, *heads) for node in graph.nodes]
    tensors = {name: t for graph in (network, *heads) for name, t in graph.tensors.items()}
    base_end, end = len(network.nodes), len(nodes)
    given = {found.tensor for head in heads for found in head.inputs.values()}
    kept = given | {found.tensor for head in heads for found in head.outputs.values()}
    last_read = {found.tensor: end for found in network.outputs.values()}
    last_read.update(dict.fromkeys(kept, end))
    for index, node in enumerate(nodes):
        last_read.update({t: max(index, last_read.get(t, 0)) for t in node.inputs.values()})

    def num_bytes(name: str) -> int:
        shape = [rows[dim] if isinstance(dim, str) else dim for dim in tensors[name].shape]
        size = math.prod(shape) * ITEM_BYTES[tensors[name].dtype]
        return -(-size // alignment) * alignment

    buffers: dict[str, _Buffer] = {}
    for index, node in enumerate(nodes):
        for role, name in node.outputs.items():
            first = min(index, base_end) if name in kept else index
            last = last_read.get(name, index)
            residual = node.inputs.get("residual", "")
            is_sum = node.op == "rms_norm" and role == "residual_out" and name not in kept
            if is_sum and last_read[residual] == index:
                buffers[name] = buffers[residual]
                buffers[name].names.append(name)
                buffers[name].first = min(first, buffers[name].first)
                buffers[name].last = last
                continue
            buffers[name] = _Buffer([name], num_bytes(name), first, last)
    for name in sorted(given - set(buffers)):
        buffers[name] = _Buffer([name], num_bytes(name), base_end, end)
    return list({id(buffer): buffer for buffer in buffers.values()}.values())
