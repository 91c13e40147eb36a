"""Every field of a quantization config that changes a result is executed or refused by name."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from pydantic import ValidationError

from llmctl.errors import UnknownQuantization
from llmctl.quantize.format import QuantizationInfo, read_quantization

FLOAT8 = {"num_bits": 8, "type": "float"}
TOKEN = {**FLOAT8, "dynamic": True, "strategy": "token"}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def read(found: dict[str, Any]) -> QuantizationInfo:
    info = read_quantization({"quantization_config": found}, None, "config.json")
    assert info is not None
    return info


def compressed(group: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {"targets": ["Linear"], "weights": FLOAT8 | {"strategy": "tensor"}}
    whole |= {"input_activations": FLOAT8}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": whole | group}, **more}


CHOICES: dict[str, list[Any]] = {
    "num_bits": [8, 8, 8, 4],
    "type": ["float", "float", "FLOAT", "int", None],
    "symmetric": [True, True, False, None],
    "strategy": [None, "tensor", "token", "group", "channel", "attn_head", "Tensor"],
    "group_size": [None, None, None, 128, -1],
    "dynamic": [True, False, False],
    "block_structure": [None, None, None, [128, 128]],
    "actorder": [None, None, "weight"],
    "observer": [None, "minmax"],
}


def test_input_activations_that_are_read_mean_what_is_executed_to_their_own_library() -> None:
    draws, num_read = random.Random(3), 0
    for _ in range(4000):
        given = {name: draws.choice(values) for name, values in CHOICES.items()}
        given = {name: value for name, value in given.items() if draws.random() < 0.8}
        try:
            found = read(compressed({"input_activations": given}))
        except UnknownQuantization:
            continue
        if found.activations is None:  # {}: refused by the builder, as weight-only
            continue
        meant = QuantizationArgs(**given)
        assert (meant.num_bits, meant.type, meant.symmetric) == (8, "float", True), given
        executed = {"static": (False, "tensor"), "dynamic": (True, "token")}[found.activations]
        assert (meant.dynamic, QuantizationStrategy(meant.strategy).value) == executed, given
        num_read += 1
    assert num_read > 20


def test_arguments_that_are_executed_are_read() -> None:
    for given, symmetric, observer in itertools.product(
        (FLOAT8, TOKEN, {**FLOAT8, "strategy": "tensor", "dynamic": False}), (True, None), (1, 0)
    ):
        more = ({} if symmetric is None else {"symmetric": symmetric}) | (
            {"observer": "minmax"} if observer else {}
        )
        wanted = "dynamic" if given is TOKEN else "static"
        assert read(compressed({"input_activations": given | more})).activations == wanted
        dumped = QuantizationArgs(**(given | more)).model_dump()
        assert read(compressed({"input_activations": dumped})).activations == wanted


def test_unknown_fields_are_refused_as_their_own_library_does() -> None:
    with pytest.raises(ValidationError):
        QuantizationArgs(**FLOAT8, rounding="down")
    with pytest.raises(UnknownQuantization, match="rounding of input_activations is 'down'"):
        read(compressed({"input_activations": {**FLOAT8, "rounding": "down"}}))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (compressed({"output_activations": FLOAT8}), "output_activations is"),
        (compressed({"weights": {**FLOAT8, "strategy": "tensor", "symmetric": False}}), "symmet"),
        (compressed({"weights": {**FLOAT8, "strategy": "tensor", "dynamic": True}}), "dynamic of"),
        (compressed({}, format="pack-quantized"), "format is 'pack-quantized'"),
        (compressed({"format": "nvfp4-pack-quantized"}), "format is 'nvfp4-pack-quantized'"),
        (compressed({}, transform_config={"config_groups": {"u": {}}}), "transform_config is"),
        (compressed({}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
        (compressed({}, kv_cache_scheme={**FLOAT8, "dynamic": True}), "dynamic of kv_cache_sch"),
        (compressed({}, kv_cache_scheme={**FLOAT8, "symmetric": False}), "symmetric of kv_cache"),
        (compressed({}, kv_cache_scheme={**FLOAT8, "strategy": "attn_head"}), "strategy of kv_c"),
        ({**FP8, "pre_quant_scale": True}, "pre_quant_scale is True"),
        ({**FP8, "has_zero_point": True}, "has_zero_point is True"),
        ({**FP8, "quantized_layers": {"model.layers.0": {}}}, "quantized_layers is"),
        ({**FP8, "kv_cache_quant_algo": "INT8", "kv_cache_scheme": FLOAT8}, "kv_cache_scheme mea"),
        (
            {**FP8, "config_groups": {"g": {"weights": FLOAT8, "input_activations": TOKEN}}},
            "dynamic of input_activations is True",
        ),
        (
            {**FP8, "config_groups": {"g": {"weights": FLOAT8, "input_activations": None}}},
            "input_activations of a config group is None",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({"quant_method": "fp8", "dequantize": True}, "dequantize is True"),
        ({"quant_method": "fp8", "modules_to_convert": ["lm_head"]}, "modules_to_convert is"),
    ],
)
def test_what_is_not_executed_is_refused_by_its_name(found: dict[str, Any], text: str) -> None:
    with pytest.raises(UnknownQuantization, match=text) as refused:
        read(found)
    assert "config.json" in str(refused.value)


def test_the_kv_cache_of_autofp8_is_not_lost() -> None:
    found = {"quant_method": "fp8", "activation_scheme": "STATIC", "kv_cache_scheme": "static"}
    assert (read(found).kv_cache_algo, read(found).activations) == ("FP8", "static")


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_groups_as_modelopt_describes_its_own_algorithms_are_read(algo: str) -> None:
    """convert_hf_config.py of ModelOpt 0.47 calls the activations of both static."""
    numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    weights = numbers if algo == "FP8" else {**numbers, "strategy": "channel"}
    groups = {"group_0": {"input_activations": numbers, "weights": weights}}
    found = read({"quant_method": "modelopt", "quant_algo": algo, "config_groups": groups})
    assert found.algo == algo
    assert found.activations == ("static" if algo == "FP8" else "dynamic")
