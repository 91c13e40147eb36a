"""Choose the kernel of every op: "<backend>.<op>.<type>", where the type is that of the main input.

A packed product on a GPU has several kernels and a table of which is fastest for how many tokens:
its tactic is the row of that table. In a TensorRT engine, operators outside the plans use the cuda
kernels.
"""

from __future__ import annotations

from dataclasses import replace

from llmctl.builder.engine_format import TENSORRT_OP
from llmctl.builder.network import Network, Node
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.schemes.table import find_form

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
_MAIN_ROLES = ("weight", "x", "qkv", "q")  # of linear and embedding, the rest, attention


def choose_tactics(network: Network, backend: str) -> Network:
    """Name a kernel for each node. A norm is named by its input, not by its weight."""
    chosen = network.copy()
    chosen.nodes = [replace(node, tactic=_tactic(network, node, backend)) for node in network.nodes]
    return chosen


def _tactic(network: Network, node: Node, backend: str) -> str:
    if node.op == TENSORRT_OP:
        return f"{backend}.{node.attributes['piece']}"
    if not node.op.startswith("packed_linear"):
        return f"{BACKENDS[backend].kernels}.{node.op}.{_type(network, node)}"
    from llmctl.plugins.ops.packed_linear.tactics import choose_tactic

    weight, has_norm = network.tensors[node.inputs["weight"]], "norm_weight" in node.inputs
    row_tiles, chunks = weight.shape[:2]
    assert isinstance(row_tiles, int) and isinstance(chunks, int)
    form = find_form(weight.dtype, node.attributes).name
    leaves = int(node.attributes.get("leaves", 1))
    return choose_tactic(
        *(node.op, row_tiles, chunks, form), has_norm=has_norm, in_leaves=leaves > 1
    )


def _type(network: Network, node: Node) -> str:
    role = next(role for role in _MAIN_ROLES if role in node.inputs)
    return _SHORT[network.tensors[node.inputs[role]].dtype]
