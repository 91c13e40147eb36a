"""For the cuda backend: every linear layer becomes a packed product, fused with what follows it.

A linear layer before SwiGLU or before RoPE and the KV write computes that in its epilogue. For this
the rows of gate and up, or the dimensions that rotate together, are interleaved (see
`plugins/ops/packed_linear/layout.py`), which costs nothing because weights are packed at build
anyway. A norm before it is included if a product that normalizes was measured to be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmctl.builder.network import Attribute, Network, Node
from llmctl.builder.packing import ITEM_BYTES, PackedRows, PackedVector, RowOrder
from llmctl.builder.schemes.reading import CodedRows
from llmctl.builder.sharding import ColumnShard, RowShard
from llmctl.builder.sources import Rows, Source
from llmctl.errors import Unsupported
from llmctl.plugins.ops.packed_linear.forms import CHUNK_BYTES, LEAF_ROWS, TILE_ROWS
from llmctl.plugins.schemes.table import find_form

# What must divide evenly for the interleaved orders (layout.py): 8 rows of either half.
_PAIR_WIDTH, _ROPE_HEAD = 8, 16


def pack_linears(network: Network, *, fuse_swiglu: bool = True) -> Network:
    """Replace every linear by packed_linear, packed_linear_swiglu or packed_linear_rope_kv."""
    packed = network.copy()
    for linear in [node for node in network.nodes if node.op == "linear"]:
        out = linear.outputs["out"]
        readers = packed.consumers(out)
        reader = readers[0] if len(readers) == 1 else None
        if reader is not None and _can_fuse_rope(reader):
            _fuse_rope(packed, linear, reader)
        elif reader is not None and fuse_swiglu and _can_fuse_swiglu(packed, reader):
            _fuse_swiglu(packed, linear, reader)
        else:
            width = packed.tensors[out].shape[1]
            assert isinstance(width, int)
            width //= int(linear.attributes.get("leaves", 1))
            inputs, attributes = _pack_inputs(packed, linear, RowOrder("plain", (width,)))
            node = replace(linear, op="packed_linear", inputs=inputs, attributes=attributes)
            packed.replace_nodes([linear], [node], at=linear)
    for node in [node for node in packed.nodes if node.op.startswith("packed_linear")]:
        _fuse_norm(packed, node)
    packed.prune()
    return packed


def _fuse_norm(network: Network, node: Node) -> None:
    """Take the rms_norm that writes the product's `x` into the product, if that helps."""
    from llmctl.plugins.ops.packed_linear.tactics import can_normalize

    norm = network.producer(node.inputs["x"])
    if norm is None or norm.op != "rms_norm" or "residual" not in norm.inputs:
        return
    if "out_scale" in norm.outputs or len(network.consumers(norm.outputs["out"])) != 1:
        return
    if norm.inputs.get("scale") != node.inputs.get("x_scale"):
        return
    weight = network.tensors[node.inputs["weight"]]
    row_tiles, chunks = (int(size) for size in weight.shape[:2])
    form = find_form(weight.dtype, node.attributes)
    is_padded = chunks * form.columns != network.tensors[norm.inputs["x"]].shape[1]
    if is_padded or not can_normalize(node.op, row_tiles, chunks, form.name):
        return
    inputs = {
        **node.inputs,
        "x": norm.inputs["x"],
        "norm_weight": norm.inputs["weight"],
        "residual": norm.inputs["residual"],
    }
    outputs = {**node.outputs, "normal": norm.outputs["out"]}
    if "residual_out" in norm.outputs:
        outputs["residual_out"] = norm.outputs["residual_out"]
    attributes = {**node.attributes, "epsilon": norm.attributes["epsilon"]}
    fused = replace(node, inputs=inputs, outputs=outputs, attributes=attributes)
    network.replace_nodes([norm, node], [fused], at=node)


def _can_fuse_rope(reader: Node) -> bool:
    if reader.op != "rope_kv_write" or "q_norm" in reader.inputs:
        return False
    return int(reader.attributes["head_size"]) % _ROPE_HEAD == 0


def _fuse_rope(network: Network, linear: Node, write: Node) -> None:
    names = ("num_heads", "num_kv_heads", "head_size")
    order = RowOrder("rope", tuple(int(write.attributes[name]) for name in names))
    rest = {role: tensor for role, tensor in write.inputs.items() if role != "qkv"}
    inputs, attributes = _pack_inputs(network, linear, order)
    node = Node(
        "packed_linear_rope_kv",
        linear.name,
        {**inputs, **rest},
        write.outputs,
        {name: write.attributes[name] for name in ("layer", *names)} | attributes,
    )
    network.replace_nodes([linear, write], [node], at=linear)


def _can_fuse_swiglu(network: Network, reader: Node) -> bool:
    """SwiGLU with per-token scales needs whole rows, which no tile of the product has."""
    if reader.op != "swiglu" or "out_scale" in reader.outputs:
        return False
    return int(network.tensors[reader.outputs["out"]].shape[1]) % _PAIR_WIDTH == 0


def _fuse_swiglu(network: Network, linear: Node, swiglu: Node) -> None:
    width = int(network.tensors[swiglu.outputs["out"]].shape[1])
    inputs, attributes = _pack_inputs(network, linear, RowOrder("pair", (width,)))
    if "scale" in swiglu.inputs:
        inputs["scale"] = swiglu.inputs["scale"]
    attributes["dtype"] = network.dtype
    node = Node("packed_linear_swiglu", linear.name, inputs, swiglu.outputs, attributes)
    network.replace_nodes([linear, swiglu], [node], at=linear)


def _pack_inputs(
    network: Network, linear: Node, order: RowOrder
) -> tuple[dict[str, str], dict[str, Attribute]]:
    """The linear's inputs with weight, weight scale and bias packed, and what the plan says of the
    weight.

    A weight that something else reads too (a tied embedding) gets an additional packed copy.
    """
    inputs, attributes = dict(linear.inputs), dict(linear.attributes)
    for role in ("weight", "weight_scale", "bias"):
        if role not in inputs:
            continue
        source = network.sources[inputs[role]]
        if len(network.consumers(inputs[role])) == 1:
            del network.sources[inputs[role]]
        if role != "weight":
            packed: Source = PackedVector(source, order)
        else:
            packed, found = _pack(linear.name, source, order)
            if "leaves" in attributes:
                packed = _in_leaves(linear.name, packed, int(attributes["leaves"]))
            attributes |= found
        inputs[role] = network.add_weight(f"{linear.name}.{role}", packed).name
    return inputs, attributes


def _in_leaves(name: str, packed: Source, leaves: int) -> Source:
    """A packed weight whose K is added in so many parts. Raises Unsupported where these are no
    whole blocks, or rows of two parts would be in one tile of the kernels."""
    if not isinstance(packed, PackedRows):
        raise Unsupported(
            f"--tp-invariant: weights of {name} are codes, which are packed in whole rows",
            fix="leave --tp-invariant out, or FP8 or 16-bit weights",
        )
    rows, inner = packed.rows.shape
    block = CHUNK_BYTES // ITEM_BYTES[packed.dtype]
    if inner % (leaves * block) or rows % LEAF_ROWS:
        raise Unsupported(
            f"--tp-invariant: {name} adds {inner} columns in {leaves} parts for {rows} rows; "
            f"wanted are parts of whole blocks of {block} columns, and a multiple of {LEAF_ROWS} "
            "rows",
            fix="leave --tp-invariant out: text is then the same for one tp_size alone",
        )
    return replace(packed, leaves=leaves)


def _pack(name: str, source: Source, order: RowOrder) -> tuple[Source, Mapping[str, Attribute]]:
    """(a weight packed, what the plan says of it). A rank's part of a whole weight is a part of the
    packed one, in whole blocks. Raises Unsupported where it does not consist of them."""
    if isinstance(source, RowShard):
        whole, found = _pack(name, source.source, RowOrder("plain", source.source.shape[:1]))
        return RowShard(whole, source.rows // TILE_ROWS), found
    if isinstance(source, ColumnShard):
        whole, found = _pack(name, source.source, order)
        assert isinstance(source.source, CodedRows)
        form = source.source.form
        if source.columns % form.columns:
            raise Unsupported(
                f"{name}: a rank has {source.columns} columns of it; packed {form.name} weights "
                f"are blocks of {form.columns}",
                fix="a smaller --tp-size, or FP8 or 16-bit weights",
            )
        return ColumnShard(whole, source.columns // form.columns), found
    if isinstance(source, Rows):
        return PackedRows(source, order), {}
    assert isinstance(source, CodedRows)
    return source.packed(order), source.form.attributes
