"""What the configs of other exporters say of numbers, held against what engines compute.

Every field that changes a result has the value that is executed, or the checkpoint is refused by
the field's name. The names and defaults are those of compressed-tensors' QuantizationArgs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.errors import UnknownQuantization
from llmctl.quantize.strict_json import shown

FORMATS = (None, "dense", "float-quantized", "naive-quantized")  # one element per weight
# Of the observer that made the scales, or of zero points, which symmetric numbers do not have.
_WITHOUT_EFFECT = ("observer", "observer_kwargs", "zp_dtype")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None, False),
}
_FLOAT8 = _PLAIN | {"type": ("float",), "num_bits": (8,)}
_STORED = {"dynamic": (False, None), "scale_dtype": None}  # None: any; the stored scale is read
_DEFAULTS = {"symmetric": True, "type": "int", "num_bits": 8, "dynamic": False}


def require_weights(found: Mapping[str, Any], where: str) -> None:
    """The weights of a config group of FP8. Raises UnknownQuantization."""
    ordered = {"group_size": (None, -1), "actorder": (None, False, "weight", "static")}
    _require(found, _FLOAT8 | _STORED | ordered | {"strategy": None}, "weights", where)


def require_inputs(found: Mapping[str, Any], where: str) -> None:
    """The input activations of a config group of FP8: one scale that the checkpoint has, or one
    per token. Raises UnknownQuantization."""
    if found.get("dynamic") is True:
        more: dict[str, Any] = {"dynamic": (True,), "strategy": ("token",), "scale_dtype": (None,)}
    else:
        more = _STORED | {"strategy": (None, "tensor")}
    _require(found, _FLOAT8 | more, "input_activations", where)


def require_kv_cache(found: Mapping[str, Any], where: str) -> None:
    """The numbers of a KV cache: one scale for K and one for V of a layer, whatever they are
    numbers of. Raises UnknownQuantization."""
    kinds = {"type": None, "num_bits": None, "strategy": (None, "tensor")}
    _require(found, _PLAIN | _STORED | kinds, "kv_cache_scheme", where)


def require_modelopt_group(group: Any, is_dynamic: bool, where: str) -> None:
    """One entry of `config_groups` of a ModelOpt FP8 checkpoint: it repeats what quant_algo says.
    Raises UnknownQuantization where it says something else. Of FP8_PER_CHANNEL_PER_TOKEN ModelOpt
    itself says "dynamic": false (0.47), so quant_algo alone decides on that."""
    group = group if isinstance(group, dict) else {}
    strategies = {"strategy": None, "scale_dtype": None}
    inputs = (False, True) if is_dynamic else (False,)
    for name, wanted in (("weights", (False,)), ("input_activations", inputs)):
        numbers = group.get(name)
        if not isinstance(numbers, dict):
            raise UnknownQuantization(f"{where}: {name} of a config group is {shown(numbers)}")
        _require(numbers, _FLOAT8 | strategies | {"dynamic": wanted}, name, where)
    require_absent(group, ("output_activations",), where)


def require_absent(found: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raises UnknownQuantization for a field of `names` that asks for something."""
    for name in names:
        if found.get(name):
            raise UnknownQuantization(
                f"{where}: {name} is {shown(found[name])}, which llmctl does not execute",
                fix="export the checkpoint again without it",
            )


def require_format(found: Mapping[str, Any], where: str) -> None:
    """How weights are stored, of a whole config or a group. Raises UnknownQuantization."""
    if found.get("format") not in FORMATS:
        raise UnknownQuantization(
            f"{where}: format is {shown(found['format'])}; {', '.join(map(str, FORMATS[1:]))} "
            "are read",
            fix="export the checkpoint again with weights that are not packed",
        )


def _require(found: Mapping[str, Any], accepted: Mapping[str, Any], name: str, where: str) -> None:
    for field in sorted(set(found) | set(accepted)):
        values = accepted.get(field, () if field not in _WITHOUT_EFFECT else None)
        value = found.get(field, _DEFAULTS.get(field))
        value = value.lower() if isinstance(value, str) else value
        # 1 == True to Python: the type decides, too
        if values is not None and not any(value == v and type(value) is type(v) for v in values):
            wanted = " or ".join(map(repr, values)) if values else "no such field"
            raise UnknownQuantization(
                f"{where}: {field} of {name} is {shown(value)}; {wanted} is wanted, which is what "
                "llmctl executes",
                fix="export the checkpoint again: FP8 numbers, symmetric, with one scale per "
                "tensor or per token",
            )
