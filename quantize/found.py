"""The quantization of a checkpoint according to its own config, for the known exporters.

ModelOpt, compressed-tensors and the "fp8" method of transformers are supported; each describes it
in its own way in config.json, ModelOpt before 0.31 in hf_quant_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmctl.errors import UnknownQuantization
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import quantized_schemes, scheme_of_algo
from llmctl.quantize.excluded import excluded_modules, matches
from llmctl.quantize.found_numbers import (
    require_absent,
    require_format,
    require_inputs,
    require_kv_cache,
    require_modelopt_group,
    require_weights,
)
from llmctl.quantize.strict_json import shown


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """The quantization that a checkpoint declares.

    method: "modelopt", "compressed-tensors" or "fp8". algo uses ModelOpt's vocabulary: "FP8" (one
    weight scale per tensor), "FP8_PER_CHANNEL_PER_TOKEN" (one per row), "FP8_BLOCK_SCALES" (one per
    128x128 block) and the other algorithms of plugins/schemes/, None if only the KV cache is
    quantized, or the declared name if it is none of these. weight_strategy is "tensor", "channel",
    "block", "group" or None; activations "static", "dynamic" or None. exclude has module names,
    wildcards (ModelOpt) or `re:` patterns (compressed-tensors).
    """

    method: str
    algo: str | None
    kv_cache_algo: str | None
    exclude: tuple[str, ...]
    weight_strategy: str | None
    activations: str | None

    @property
    def scheme(self) -> QuantizedScheme | None:
        """The scheme of the weights; None where none are quantized, or by one that is not read."""
        return scheme_of_algo(self.algo)

    def excludes(self, module: str) -> bool:
        """Whether `module` ("model.layers.0.mlp.up_proj") is stored unquantized by name."""
        return any(matches(pattern, module) for pattern in self.exclude)


def read_quantization(
    config: dict[str, Any], nested: dict[str, Any] | None, where: str
) -> QuantizationInfo | None:
    """The quantization of a checkpoint, None for a plain one.

    config: config.json. nested: hf_quant_config.json or None; it speaks when config.json is
    silent (ModelOpt before 0.31). Raises UnknownQuantization for a method llmctl does not read, or
    for two that say different things: some programs read the one, some the other.
    """
    found = config.get("quantization_config")
    if found is None or found == {}:
        found = config.get("compression_config")
    stated = None if found is None else _stated(found, where)
    if nested is None:
        return stated
    name, found = "quantization of hf_quant_config.json", nested.get("quantization", nested)
    other = _modelopt(_required_object(found, name, where), where)
    if stated is None:
        return other
    _require_same(stated, other, where)
    # Older versions of ModelOpt wrote no KV cache into config.json.
    return replace(stated, kv_cache_algo=stated.kv_cache_algo or other.kv_cache_algo)


def _require_same(stated: QuantizationInfo, other: QuantizationInfo, where: str) -> None:
    # Not the excluded modules: what the weights are stored as has the last word on those. One that
    # says nothing of the KV cache disagrees with nobody.
    for name in ("algo", "activations", "kv_cache_algo"):
        one, two = getattr(stated, name), getattr(other, name)
        is_silent = name == "kv_cache_algo" and None in (one, two)
        if one != two and not is_silent:
            raise UnknownQuantization(
                f"{where} and hf_quant_config.json beside it disagree: {name} is {shown(one)} by "
                f"the former, {shown(two)} by the latter",
                fix="correct the one that is wrong, or take hf_quant_config.json away",
            )


def _stated(found: Any, where: str) -> QuantizationInfo:
    found = _required_object(found, "quantization_config", where)
    method = str(found.get("quant_method", "")).lower()
    if not method and "config_groups" in found:
        method = "compressed-tensors"
    reader = {
        "modelopt": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
    }.get(method)
    if reader is None:
        raise UnknownQuantization(
            f"{where}: quant_method is {shown(method or 'absent')}; "
            "llmctl reads modelopt, compressed-tensors and fp8",
        )
    return reader(found, where)


# found (upper case) -> algo, weight strategy, activations, of those that no scheme reads
_OTHER_ALGOS: dict[str, tuple[str, str, str | None]] = {
    "FP8_PB_WO": ("FP8_BLOCK_SCALES", "block", None),
    "FP8_BLOCK_SCALES": ("FP8_BLOCK_SCALES", "block", "dynamic"),
}


def _has_plain_scales(algo: str | None) -> bool:
    """Whether weights and activations are FP8 numbers of one scale per tensor, row or token."""
    scheme = scheme_of_algo(algo)
    return scheme is not None and scheme.storage.block is None


def _modelopt(found: dict[str, Any], where: str) -> QuantizationInfo:
    name = _name(found, "quant_algo", where)
    known: dict[str, tuple[str, str, str | None]] = {
        each.name: (each.name, each.weight_strategy, each.activations)
        for scheme in quantized_schemes()
        for each in scheme.algorithms
    }
    algo, strategy, activations = (known | _OTHER_ALGOS).get(str(name).upper(), (name, None, None))
    kv_cache = _name(found, "kv_cache_quant_algo", where)
    other = _kv_cache_algo(found.get("kv_cache_scheme"), where)
    if kv_cache is not None and other not in (None, kv_cache):
        raise UnknownQuantization(
            f"{where}: kv_cache_quant_algo is {shown(kv_cache)}, kv_cache_scheme means {other}",
            fix="correct the one that is wrong",
        )
    kv_cache = other if kv_cache is None else kv_cache
    require_absent(found, ("has_zero_point", "pre_quant_scale", "quantized_layers"), where)
    if _has_plain_scales(algo):
        groups = found.get("config_groups") or {}
        for group in groups.values() if isinstance(groups, dict) else [groups]:
            require_modelopt_group(group, activations == "dynamic", where)
    exclude = found.get("exclude_modules") or found.get("ignore")
    return QuantizationInfo(
        "modelopt", algo, kv_cache, excluded_modules(exclude, where), strategy, activations
    )


def _compressed_tensors(found: dict[str, Any], where: str) -> QuantizationInfo:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else 0
        raise UnknownQuantization(
            f"{where}: compressed-tensors with {count} config_groups; exactly one is read"
        )
    (group,) = groups.values()
    weights = _object(group, "weights", where)
    inputs = _object(group, "input_activations", where)
    strategy = weights.get("strategy")
    if not isinstance(inputs.get("dynamic", False), bool | None):
        raise UnknownQuantization(
            f"{where}: dynamic of the activations is {shown(inputs['dynamic'])}; true or false is "
            "wanted"
        )
    is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
    algos = {
        "tensor": "FP8",
        "channel": "FP8_PER_CHANNEL_PER_TOKEN",
        "block": "FP8_BLOCK_SCALES",
    }
    algo = algos.get(str(strategy)) if is_fp8 else None
    if algo is None:
        algo = f"{weights.get('type')}{weights.get('num_bits')}-{strategy}"
    if _has_plain_scales(algo):
        require_weights(weights, where)
        if inputs:
            require_inputs(inputs, where)
        require_format(found, where)
        require_format(group, where)
    require_absent(group if isinstance(group, dict) else {}, ("output_activations",), where)
    require_absent(found, ("transform_config",), where)
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        require_absent(found, ("sparsity_config",), where)
    activations = None if not inputs else "dynamic" if inputs.get("dynamic") else "static"
    return QuantizationInfo(
        "compressed-tensors",
        algo,
        _kv_cache_algo(found.get("kv_cache_scheme"), where),
        excluded_modules(found.get("ignore"), where),
        strategy,
        activations,
    )


def _fp8(found: dict[str, Any], where: str) -> QuantizationInfo:
    is_block = found.get("weight_block_size") is not None
    if is_block and found["weight_block_size"] != [128, 128]:
        raise UnknownQuantization(
            f"{where}: weight_block_size is {shown(found['weight_block_size'])}; [128, 128] is read"
        )
    require_absent(found, ("dequantize", "modules_to_convert"), where)
    for name, wanted in (("fmt", "e4m3"), ("scale_fmt", "float")):
        if found.get(name) not in (None, wanted):
            raise UnknownQuantization(
                f"{where}: {name} is {shown(found[name])}; {wanted!r} is read",
                fix="export the checkpoint again",
            )
    exclude = found.get("modules_to_not_convert") or found.get("ignored_layers")
    kv_cache = found.get("kv_cache_scheme")  # AutoFP8 calls FP8 with stored scales "static"
    return QuantizationInfo(
        "fp8",
        "FP8_BLOCK_SCALES" if is_block else "FP8",
        "FP8" if kv_cache == "static" else _kv_cache_algo(kv_cache, where),
        excluded_modules(exclude, where),
        "block" if is_block else "tensor",
        str(found.get("activation_scheme", "dynamic")).lower(),
    )


def _kv_cache_algo(scheme: Any, where: str) -> str | None:
    """`kv_cache_scheme` is absent, a name, or compressed-tensors arguments."""
    if not isinstance(scheme, dict):
        return str(scheme) if scheme else None
    require_kv_cache(scheme, where)
    name = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return {"float8": "FP8", "int8": "INT8"}.get(name, name)


def _required_object(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnknownQuantization(
            f"{where}: {name} is {shown(value)}; an object is wanted",
            fix="fetch the file again, or correct it",
        )
    return value


def _object(parent: Any, key: str, where: str) -> dict[str, Any]:
    value = parent.get(key) if isinstance(parent, dict) else None
    if value is not None and not isinstance(value, dict):
        raise UnknownQuantization(f"{where}: {key} of a config group is not an object")
    return value or {}


def _name(found: dict[str, Any], key: str, where: str) -> str | None:
    value = found.get(key)
    if value is not None and not isinstance(value, str):
        raise UnknownQuantization(f"{where}: {key} is {shown(value)}; a name or null is wanted")
    return value
