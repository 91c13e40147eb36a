"""Give linear layers the quantized weights and activation scales of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmctl.builder.network import Network, Node
from llmctl.builder.schemes.table import READERS
from llmctl.builder.sources import LargestScale, Rows
from llmctl.errors import Unsupported
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import titles


@dataclass(frozen=True, slots=True)
class LinearScales:
    """The scale tensors of one quantized linear, and the scheme of its weight. Without input_scale
    each token gets its own scale at run time."""

    weight_scale: str
    input_scale: str | None
    scheme: QuantizedScheme


def quantize_linears(network: Network, scales: Mapping[str, LinearScales]) -> Network:
    """Insert a quantize node before every linear whose modules are in `scales`.

    The weight becomes what its scheme multiplies, with one scale per output row: a merged linear
    repeats each part's scale.
    Static input scales of merged parts are combined to their largest. Raises Unsupported when the
    parts of one merged linear are not quantized alike.
    """
    quantized = network.copy()
    for node in network.nodes:
        if node.op == "linear":
            source = network.sources[node.inputs["weight"]]
            assert isinstance(source, Rows)
            modules = [name.removesuffix(".weight") for name in source.names]
            found = [scales[module] for module in modules if module in scales]
            if not found:
                continue
            kinds = {(s.input_scale is None, s.scheme) for s in found}
            if len(found) != len(modules) or len(kinds) != 1:
                raise Unsupported(
                    f"{', '.join(modules)} are quantized differently; parts of one merged linear "
                    f"must all be {titles(' or all ')} with the same kind of activation scale, or "
                    "all unquantized",
                    fix="quantize again, excluding all of them or none",
                )
            _quantize(quantized, node, source, found)
    quantized.prune()
    return quantized


def _quantize(network: Network, node: Node, source: Rows, scales: list[LinearScales]) -> None:
    scheme = scales[0].scheme
    reader, stored = READERS[scheme.name], tuple(s.weight_scale for s in scales)
    numbers, row_scales = reader.numbers(source.parts), reader.row_scales(source.parts, stored)
    weight = node.inputs["weight"]
    del network.sources[weight]
    network.add_weight(weight, numbers)
    scale = network.add_weight(f"{node.name}.weight_scale", row_scales).name
    x = network.tensors[node.inputs["x"]]
    out = network.add_activation(f"{node.name}.x", scheme.activation_dtype, x.shape).name
    inputs, outputs = {"x": x.name}, {"out": out}
    static = [s.input_scale for s in scales if s.input_scale is not None]
    if static:
        x_scale = network.add_weight(f"{node.name}.input_scale", LargestScale(tuple(static))).name
        inputs["scale"] = x_scale
    else:
        x_scale = network.add_activation(f"{node.name}.x_scale", "float32", x.shape[:1]).name
        outputs["out_scale"] = x_scale
    quantize = Node("quantize", f"{node.name}.quantize", inputs, outputs)
    scaled = {**node.inputs, "x": out, "weight_scale": scale, "x_scale": x_scale}
    network.replace_nodes([node], [quantize, replace(node, inputs=scaled)], at=node)
