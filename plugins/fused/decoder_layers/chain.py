"""Which calls of a program are whole decoder layers as layers.cu computes them, and their tensors.

A layer is: normalize (in the product or ahead of it), QKV with rotary embedding and KV write,
attention, output projection, normalize, gate and up with SwiGLU, down. In a model's last layer the
rows that get logits are gathered behind attention, and their residual. Weights and tokens of every
product are FP8 with one scale for all tokens, or all weights are codes that layers.cu knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.packed_linear.arguments import form_of, is_fp8, name_of
from llmctl.plugins.ops.packed_linear.norm import norm_call
from llmctl.plugins.ops.paged_attention.batch.batch import covers_batch
from llmctl.plugins.schemes import table as schemes

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
    from llmctl.plugins.core.calls import OpCall
    from llmctl.plugins.schemes.scheme import Form

_COVERED = (*schemes.FP8.forms, *schemes.MXFP4.forms)  # weights that layers.cu multiplies
_MOST_HIDDEN, _NORM_PART = 8192, 256


@dataclass(frozen=True, slots=True)
class Share:
    """How a product is divided: a thread block processes groups of 8 or 16 weight rows, and a ring
    unit of a group is so many intervals of 512 of K that rows times intervals are 64."""

    group_rows: int
    groups: int  # the most groups per block
    units: int  # of a group

    def token_bytes(self, tokens: int) -> int:
        """Shared memory for FP8 tokens: those at a ring unit's intervals side by side, in groups of
        eight."""
        return self.units * 512 * (-(-64 // self.group_rows * tokens // 8) * 8)

    def sum_bytes(self, tokens: int) -> int:
        """Shared memory for a block's sums: float32, 64 per ring unit and token."""
        return self.groups * self.units * tokens * 256


def _share(rows: int, inner: int, is_paired: bool, num_sms: int) -> Share:
    """Groups of 16 rows, or of 8 where that leaves less to the block with the most and the epilogue
    needs no rows 8 apart."""

    def share(group_rows: int) -> Share:
        groups = -(-rows // group_rows // num_sms)
        return Share(group_rows, groups, -(-inner // 512 * group_rows // 64))

    wide, narrow = share(16), share(8)
    is_less = narrow.groups * 8 < wide.groups * 16
    return narrow if is_less and not is_paired else wide


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's calls. Its norms are rms_norm calls; that of qkv may be missing (its tokens are
    then already normalized)."""

    start: int  # its first call
    stop: int  # after its last call
    qkv_norm: OpCall | None
    qkv: OpCall
    attention: OpCall
    o: OpCall
    mlp_norm: OpCall
    gate_up: OpCall
    down: OpCall
    gathers: tuple[OpCall, ...]  # of the last layer: of the attention output and of the residual

    @property
    def residual(self) -> torch.Tensor:
        """What the second norm adds, of all tokens."""
        return self.gathers[1].inputs["x"] if self.gathers else self.mlp_norm.inputs["residual"]

    @property
    def hidden(self) -> int:
        """Elements of a token."""
        return self.o.outputs["out"].shape[1]

    @property
    def attended(self) -> int:
        """Elements of a token that attention gives."""
        return self.attention.outputs["out"].shape[1]

    @property
    def intermediate(self) -> int:
        """Elements of a token between the products of the MLP."""
        return self.gate_up.outputs["out"].shape[1]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self.qkv.attributes["num_heads"])

    @property
    def num_kv_heads(self) -> int:
        """Key heads."""
        return int(self.qkv.attributes["num_kv_heads"])

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return int(self.qkv.attributes["head_size"])

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dtype(self) -> str:
        """The model's own type."""
        return name_of(self.o.outputs["out"])

    @property
    def weights(self) -> Form:
        """The form of the packed weights."""
        return form_of(self.qkv)

    @property
    def rotary(self) -> torch.Tensor:
        """Cosines and sines by position."""
        return self.qkv.inputs["rotary"]

    @property
    def epsilon(self) -> float:
        """Of the norms."""
        return float(self.mlp_norm.attributes["epsilon"])

    @property
    def logit_scale(self) -> float:
        """What logits of attention are multiplied with, in powers of two."""
        return float(self.attention.attributes["softmax_scale"]) * math.log2(math.e)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(weight rows, K) of the four products."""
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        return (
            (rows, self.hidden),
            (self.hidden, self.attended),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )

    def shares(self, num_sms: int) -> tuple[Share, ...]:
        """How each product is divided over thread blocks."""
        pairs = (True, False, True, False)  # the epilogue combines rows 8 apart
        return tuple(
            _share(rows, inner, paired, num_sms)
            for (rows, inner), paired in zip(self.products, pairs, strict=True)
        )

    @property
    def form(self) -> tuple[object, ...]:
        """What layers of one chain have in common."""
        norm = self.qkv_norm or self.mlp_norm
        scales = [role in self.attention.inputs for role in ("k_scale", "v_scale")]
        return (
            self.products, self.num_kv_heads, self.dtype, self.epsilon, self.logit_scale,
            norm.attributes["epsilon"], self.weights, *scales,
        )  # fmt: skip


def find_layers(calls: Sequence[OpCall], limits: StepLimits) -> list[Layer]:
    """The longest run of layers of one form that follow each other."""
    runs: list[list[Layer]] = [[]]
    at = 0
    while at < len(calls):
        layer = _layer_at(calls, at, limits)
        if layer is None:
            at += 1
            continue
        last = runs[-1][-1] if runs[-1] else None
        if last is not None and not _follows(layer, last):
            runs.append([])
        if runs[-1] or layer.qkv_norm is None:  # the first layer's tokens come normalized
            runs[-1].append(layer)
        at = layer.stop
    return max(runs, key=len)


def read_layers(calls: Sequence[OpCall], start: int, stop: int, limits: StepLimits) -> list[Layer]:
    """Calls [start, stop) as layers of one form that follow each other; none if they are not."""
    layers: list[Layer] = []
    at = start
    while 0 <= at < stop <= len(calls):
        layer = _layer_at(calls, at, limits)
        if layer is None or layer.stop > stop or (layers and not _follows(layer, layers[-1])):
            return []
        if not layers and layer.qkv_norm is not None:
            return []
        layers.append(layer)
        at = layer.stop
    return layers if at == stop else []


def _follows(layer: Layer, last: Layer) -> bool:
    norm = layer.qkv_norm
    return (
        layer.start == last.stop
        and layer.form == last.form
        and norm is not None
        and norm.inputs["x"] is last.down.outputs["out"]
        and norm.inputs["residual"] is last.mlp_norm.outputs.get("residual_out")
        and layer.residual is norm.outputs.get("residual_out")
    )


def layer_fields(layer: Layer, kv_cache: torch.Tensor) -> list[torch.Tensor | None]:
    """The tensors of `Layer` in chain.cuh, in order."""
    fields: list[torch.Tensor | None] = []
    for call in (layer.qkv, layer.o, layer.gate_up, layer.down):
        fields += [call.inputs.get(r) for r in ("weight", "weight_scale", "x_scale", "bias")]
    norm = layer.qkv_norm
    fields += [None if norm is None else norm.inputs["weight"], layer.mlp_norm.inputs["weight"]]
    fields += [layer.gate_up.inputs["scale"], kv_cache[int(layer.qkv.attributes["layer"])]]
    fields += [layer.attention.inputs.get(role) for role in ("k_scale", "v_scale", "out_scale")]
    return fields


def _layer_at(calls: Sequence[OpCall], at: int, limits: StepLimits) -> Layer | None:
    """The layer that starts with this call, if one does."""
    start = at

    def take(op: str) -> OpCall | None:
        nonlocal at
        if at < len(calls) and calls[at].op == op:
            at += 1
            return calls[at - 1]
        return None

    def take_norm(op: str) -> tuple[OpCall | None, OpCall | None]:
        """(the norm ahead of a product, the product)."""
        norm = take("rms_norm")
        product = take(op)
        if product is not None and norm is None and "norm_weight" in product.inputs:
            norm = norm_call(product)
        return norm, product

    qkv_norm, qkv = take_norm("packed_linear_rope_kv")
    attention, rows = take("paged_attention"), take("gather_rows")
    o, kept = take("packed_linear"), take("gather_rows")
    mlp_norm, gate_up = take_norm("packed_linear_swiglu")
    down = take("packed_linear")
    if qkv is None or attention is None or o is None or mlp_norm is None or gate_up is None:
        return None
    if down is None or (rows is None) != (kept is None):
        return None
    gathers = () if rows is None or kept is None else (rows, kept)
    layer = Layer(start, at, qkv_norm, qkv, attention, o, mlp_norm, gate_up, down, gathers)
    return layer if _is_covered(layer, limits) else None


def _is_covered(layer: Layer, limits: StepLimits) -> bool:
    norms = [norm for norm in (layer.qkv_norm, layer.mlp_norm) if norm is not None]
    products = (layer.qkv, layer.o, layer.gate_up, layer.down)
    attended, residual = layer.attention.outputs["out"], layer.residual
    if layer.gathers:
        attended, residual = (gather.outputs["out"] for gather in layer.gathers)
    passed_on = (
        (layer.attention.inputs["q"], layer.qkv.outputs["q"]),
        *((gather.inputs["x"], layer.attention.outputs["out"]) for gather in layer.gathers[:1]),
        (layer.o.inputs["x"], attended),
        (layer.mlp_norm.inputs["residual"], residual),
        (layer.mlp_norm.inputs["x"], layer.o.outputs["out"]),
        (layer.down.inputs["x"], layer.gate_up.outputs["out"]),
    )
    return (
        all(taken is given for taken, given in passed_on)
        and all("residual" in norm.inputs and "scale" in norm.inputs for norm in norms)
        and all(_is_static(call) for call in products)
        and len({form_of(call) for call in products}) == 1
        and layer.weights in _COVERED
        and "scale" in layer.gate_up.inputs
        and name_of(layer.attention.outputs["out"]) == FP8
        and covers_batch(layer.attention, limits)
        and layer.dtype in ("bfloat16", "float16")
        and all(rows % 64 == 0 and inner % 512 == 0 for rows, inner in layer.products)
        and layer.hidden % _NORM_PART == 0
        and layer.hidden <= _MOST_HIDDEN
    )


def _is_static(call: OpCall) -> bool:
    scale = call.inputs.get("x_scale")
    has_fp8_tokens = name_of(call.inputs["x"]) in (FP8, "bfloat16", "float16")
    return is_fp8(call) and has_fp8_tokens and scale is not None and scale.numel() == 1
