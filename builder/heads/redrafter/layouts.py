"""Names of the tensors of a ReDrafter head: the published layouts, and the one it is built from.

    input_proj.{weight,bias}           [exit, 2 hidden], [exit]; only where exit is not 2 hidden
    lm_head.{i}.linear.{weight,bias}   [exit, exit], [exit], for i = 0, 1, ...
    lm_head.{n}.weight                 [vocab, exit], n: how many i there are
    rnn_w.weight, rnn_u.{weight,bias}  [hidden, hidden], [hidden]; not where "rnn" is false

are those of Apple's trainer; those of TensorRT-LLM's converter are an engine's own, in MODULE:
drafter.layers.{i}.linear, drafter.lm_head, drafter.rnn_w, ... A quantized linear has its scales
beside its weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmctl.builder.heads.redrafter.names import MODULE
from llmctl.errors import UnexpectedTensor
from llmctl.quantize.checkpoint import TensorInfo

SCALES = ("weight_scale", "input_scale")  # of a quantized linear
_UNREAD = ("emb_norm.weight",)  # that no implementation applies
_WEIGHT = "weight|weight_scale|input_scale"
_SPELLINGS = (  # names of several revisions of Apple's code -> those in MODULE
    (re.compile(rf"input_projs?\.(bias|{_WEIGHT})"), r"input_proj.\1"),
    (
        re.compile(rf"(?:lm_heads?|0)\.(\d{{1,3}})\.linear\.(bias|{_WEIGHT})"),
        r"layers.\1.linear.\2",
    ),
    (re.compile(rf"(?:lm_heads?|0)\.(\d{{1,3}})\.({_WEIGHT})"), r"lm_head.\1.\2"),
    (re.compile(rf"(rnn_u\.(?:bias|{_WEIGHT})|rnn_w\.(?:{_WEIGHT}))"), r"\1"),
)
_CONVERTED = re.compile(
    rf"(input_proj|layers\.\d{{1,3}}\.linear|rnn_u)\.(bias|{_WEIGHT})|(lm_head|rnn_w)\.({_WEIGHT})"
)
_OUTPUT = re.compile(r"lm_head\.(\d{1,3})\.(\w+)")


def spelled(where: Path, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors as Apple's code names them, by their names in MODULE. The output matrix, whose name
    is a number there, has the highest. Raises UnexpectedTensor."""
    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        if name in _UNREAD:
            continue
        own = next((p.sub(to, name) for p, to in _SPELLINGS if p.fullmatch(name)), None)
        if own is None:
            raise unexpected(where, name)
        if own in found:
            raise unexpected(where, f"{name} beside {found[own].name}")
        found[own] = info
    layers = len(layer_numbers(found))
    for name in list(found):
        output = _OUTPUT.fullmatch(name)
        if output is not None and int(output[1]) != layers:
            raise UnexpectedTensor(
                f"{where} holds {found[name].name}; with {layers} layers the output matrix is "
                f"lm_head.{layers}.weight",
                fix="fetch the head again",
            )
        if output is not None:
            found[f"lm_head.{output[2]}"] = found.pop(name)
    return found


def converted(where: Path, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of TensorRT-LLM's checkpoint, which holds the target too. Raises UnexpectedTensor."""
    prefix = f"{MODULE}."
    own = {n.removeprefix(prefix): info for n, info in stored.items() if n.startswith(prefix)}
    for name in own:
        if not _CONVERTED.fullmatch(name):
            raise unexpected(where, prefix + name)
    return own


def stored_module(module: str, num_layers: int, *, is_converted: bool) -> str:
    """What a layout calls a linear of MODULE."""
    if is_converted:
        return f"{MODULE}.{module}"
    return f"lm_head.{num_layers}" if module == "lm_head" else re.sub("^layers", "lm_head", module)


def layer_numbers(names: Iterable[str]) -> set[str]:
    """Of the layers that names in MODULE are of."""
    return {name.split(".")[1] for name in names if name.startswith("layers.")}


def unexpected(where: Path, name: str) -> UnexpectedTensor:
    """For a tensor that no such head has."""
    return UnexpectedTensor(
        f"{where} holds {name}, which no ReDrafter head has",
        fix="use a head in the layout of apple/ml-recurrent-drafter",
    )
