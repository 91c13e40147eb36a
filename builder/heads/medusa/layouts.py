"""Names of the tensors of Medusa heads: the published layouts, and the one that is built from.

Here and in FasterDecoding/Medusa, head m has residual blocks l = 0, 1, ... and an output matrix:

    {m}.{l}.linear.weight [hidden, hidden]
    {m}.{l}.linear.bias [hidden]
    {m}.{L}.weight [vocab, hidden]

Without output matrices ("version 2" of text-generation-inference) the heads share the target's.
vLLM's names are other ones, and a bias is optional:

    blocks.{m}.layers.{l}.weight, .bias
    lm_heads.{m}.weight, or one matrix for all heads: lm_head.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmctl.errors import UnexpectedTensor, Unsupported

MODULE = "medusa_head"  # that heads are in, in an engine as in a Medusa-2 checkpoint
SHARED = "lm_head"  # of MODULE: the output matrix of all heads
OWN, COMMON, TARGETS = "own", "common", "target"  # whose output matrix a head has: see Layout
_LINEAR = r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)"
_OUTPUT = r"(\d{1,3})\.(\d{1,3})\.weight"
_SCALES = ("weight_scale", "input_scale")  # of a quantized linear
_VLLM = (  # name there -> name here; L stands for the number of blocks
    (r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(\w+)", r"\1.\2.linear.\3"),
    (r"lm_heads\.(\d{1,3})\.(\w+)", r"\1.L.\2"),
    (r"lm_head\.(\w+)", rf"{SHARED}.\1"),
)
Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True)
class Layout:
    """What the names of a checkpoint amount to.

    output: each head has a matrix of its OWN, one of the checkpoint is COMMON to all, or all have
    the TARGET's output projection.
    """

    num_heads: int
    num_layers: int  # residual blocks of each
    has_bias: bool
    output: str

    def names(self, num_heads: int) -> list[str]:
        """The tensors of the first heads, scales left out."""
        kinds = ("weight", "bias") if self.has_bias else ("weight",)
        found = [
            name
            for head in range(num_heads)
            for name in (
                *(
                    f"{head}.{layer}.linear.{kind}"
                    for layer in range(self.num_layers)
                    for kind in kinds
                ),
                *((f"{head}.{self.num_layers}.weight",) if self.output == OWN else ()),
            )
        ]
        return [*found, *((f"{SHARED}.weight",) if self.output == COMMON else ())]

    def linears(self, num_heads: int) -> list[str]:
        """The modules of the first heads that multiply."""
        return [n.removesuffix(".weight") for n in self.names(num_heads) if n.endswith(".weight")]


def renamed(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: Path
) -> dict[str, Tensor]:
    """The tensors with the names of this module; those of vLLM are translated.

    Raises Unsupported for heads of a part of the vocabulary.
    """
    own = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    if "token_map" in own:
        raise Unsupported(
            f"{where} has a token_map: its heads know a part of the vocabulary, which is not read",
            fix="use heads whose output matrices have a row for each token",
        )
    if not any(name.startswith("blocks.") for name in own):
        return own
    if config.get("original_lm_head") is True and "lm_heads.0.weight" in own:
        own[f"{SHARED}.weight"] = own.pop("lm_heads.0.weight")  # as vLLM takes it
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        for form, here in _VLLM:
            if re.fullmatch(form, name):
                found[re.sub(form, here, name)] = tensor
                break
        else:
            found[name] = tensor  # refused by `find_layout`
    layers = [int(name.split(".")[1]) for name in found if re.fullmatch(_LINEAR, name)]
    num_layers = 1 + max(layers, default=-1)
    return {name.replace(".L.", f".{num_layers}."): tensor for name, tensor in found.items()}


def find_layout(names: Iterable[str], where: Path) -> Layout:
    """What the names say. Raises UnexpectedTensor."""
    num_heads = num_layers = 0
    has_bias = outputs = has_common = False
    plain = [n for n in names if not n.endswith(_SCALES)]
    for name in plain:
        linear, output = re.fullmatch(_LINEAR, name), re.fullmatch(_OUTPUT, name)
        if linear is not None:
            num_heads = max(num_heads, int(linear[1]) + 1)
            num_layers = max(num_layers, int(linear[2]) + 1)
            has_bias = has_bias or linear[3] == "bias"
        elif output is not None:
            num_heads = max(num_heads, int(output[1]) + 1)
            outputs = True
        elif name == f"{SHARED}.weight":
            has_common = True
        else:
            raise UnexpectedTensor(
                f"{where} holds {name!r}, which no Medusa head has; heads are read as "
                "HEAD.BLOCK.linear.weight, HEAD.BLOCK.linear.bias and HEAD.BLOCK.weight, or as "
                "vLLM names them",
                fix="use heads in the layout of FasterDecoding/Medusa or of vLLM",
            )
    if outputs and has_common:
        raise UnexpectedTensor(
            f"{where} holds '{SHARED}.weight' beside output matrices of single heads",
            fix="remove the one that is not the heads'",
        )
    whose = OWN if outputs else COMMON if has_common else TARGETS
    return Layout(num_heads, num_layers, has_bias, whose)
