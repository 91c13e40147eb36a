"""What a checkpoint says about its quantization, whichever exporter wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from llmctl import errors
from llmctl.quantize.format import (
    NOT_WRITTEN,
    QuantizationInfo,
    find_scheme,
    quantization_documents,
    read_quantization,
)
from llmctl.quantize.layers import import_modelopt

FLOAT8 = {"num_bits": 8, "type": "float"}
TOKEN = {**FLOAT8, "dynamic": True, "strategy": "token"}


def read(config: dict[str, Any], nested: dict[str, Any] | None = None) -> QuantizationInfo | None:
    return read_quantization(config, nested, "config.json")


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> Any:
    group = {"targets": ["Linear"], "weights": FLOAT8 | weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | more
    return {"quantization_config": config}


def test_a_plain_checkpoint_has_no_quantization() -> None:
    assert read({"model_type": "llama"}) is None


def test_what_llmctl_writes_reads_back_from_either_document() -> None:
    nested, flat = quantization_documents(find_scheme("fp8"), "FP8", ["lm_head"], "0.47.0")
    wanted = QuantizationInfo("modelopt", "FP8", "FP8", ("lm_head",), "tensor", "static")
    assert read({"quantization_config": flat}) == wanted
    assert read({}, nested) == wanted  # checkpoints of ModelOpt before 0.31


def test_an_mxfp4_checkpoint_names_its_scheme_in_either_document() -> None:
    scheme = find_scheme("w4a8_mxfp4_fp8")
    nested, flat = quantization_documents(scheme, "FP8", ["lm_head"], "0.47.0")
    for found in (read({"quantization_config": flat}), read({}, nested)):
        assert found is not None
        assert (found.method, found.algo) == ("modelopt", "W4A8_MXFP4_FP8")
        assert (found.kv_cache_algo, found.exclude) == ("FP8", ("lm_head",))
    assert nested["quantization"]["group_size"] == 32


@pytest.mark.parametrize("silent", ["nested", "flat", "neither"])
def test_either_document_may_be_silent_about_the_kv_cache(silent: str) -> None:
    nested, flat = quantization_documents(find_scheme("fp8"), "FP8", ["lm_head"], "0.47.0")
    if silent == "nested":
        nested["quantization"]["kv_cache_quant_algo"] = None
    elif silent == "flat":
        del flat["kv_cache_scheme"]
    found = read({"quantization_config": flat}, nested)
    assert found is not None and found.kv_cache_algo == "FP8"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "algo is 'FP8' by the former, 'FP8_PER_"),
        ({"quant_algo": None}, "algo is 'FP8' by the former, None by the latter"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_algo is 'FP8' by the former, 'INT8'"),
    ],
)
def test_two_documents_that_disagree_are_refused(change: dict[str, Any], text: str) -> None:
    """ModelOpt makes the one of the other; TensorRT-LLM reads the nested one, others the flat."""
    nested, flat = quantization_documents(find_scheme("fp8"), "FP8", ["lm_head"], "0.47.0")
    assert read({"quantization_config": flat}, nested) == read({"quantization_config": flat})
    nested["quantization"] |= change
    with pytest.raises(errors.UnknownQuantization, match=text) as refused:
        read({"quantization_config": flat}, nested)
    assert "hf_quant_config.json" in str(refused.value)


@pytest.mark.parametrize("algo", ["FP8", "W4A8_MXFP4_FP8", "FP8_PER_CHANNEL_PER_TOKEN", None])
@pytest.mark.parametrize("kv_cache", ["FP8", "INT8", None])
def test_the_two_documents_of_modelopt_agree(algo: str | None, kv_cache: str | None) -> None:
    import_modelopt()
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    quantization = {"quant_algo": algo, "kv_cache_quant_algo": kv_cache, "exclude_modules": ["x"]}
    nested = {"producer": {"name": "modelopt"}, "quantization": quantization}
    flat = convert_hf_quant_config_format(nested)
    found = read({"quantization_config": flat}, nested)
    assert found is not None and (found.algo, found.kv_cache_algo) == (algo, kv_cache)


def test_a_flat_hf_quant_config_is_read() -> None:
    nested = {"quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": FLOAT8}
    found = read({}, nested)
    assert found is not None
    assert (found.algo, found.kv_cache_algo, found.exclude) == ("FP8", "FP8", ("lm_head",))


@pytest.mark.parametrize(
    ("config", "algo", "strategy", "activations", "kv_cache"),
    [
        (compressed({"strategy": "tensor"}, FLOAT8), "FP8", "tensor", "static", None),
        (
            compressed({"strategy": "tensor"}, FLOAT8, kv_cache_scheme=FLOAT8),
            "FP8",
            "tensor",
            "static",
            "FP8",
        ),
        (
            compressed({"strategy": "channel"}, TOKEN),
            "FP8_PER_CHANNEL_PER_TOKEN",
            "channel",
            "dynamic",
            None,
        ),
        (
            compressed({"strategy": "block"}, {"dynamic": True}),
            "FP8_BLOCK_SCALES",
            "block",
            "dynamic",
            None,
        ),
        (
            compressed({"strategy": "group", "type": "int", "num_bits": 4}, None),
            "int4-group",
            "group",
            None,
            None,
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "FP8_BLOCK_SCALES",
            "block",
            "dynamic",
            None,
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "FP8",
            "tensor",
            "static",
            None,
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}},
            "FP8_BLOCK_SCALES",
            "block",
            None,
            None,
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "NVFP4",
            None,
            None,
            None,
        ),
    ],
)
def test_other_exporters_are_understood(
    config: dict[str, Any],
    algo: str,
    strategy: str | None,
    activations: str | None,
    kv_cache: str | None,
) -> None:
    found = read(config)
    assert found is not None
    assert (found.algo, found.weight_strategy) == (algo, strategy)
    assert (found.activations, found.kv_cache_algo) == (activations, kv_cache)


def test_compression_config_is_read_like_quantization_config() -> None:
    config = compressed({"strategy": "tensor"}, FLOAT8)
    assert read({"compression_config": config["quantization_config"]}) == read(config)


@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "gptq"},
        {"quant_method": "awq"},
        {"bits": 4},
        "fp8",
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"},
    ],
)
def test_an_unknown_quantization_is_refused_by_name(found: Any) -> None:
    with pytest.raises(errors.UnknownQuantization):
        read({"quantization_config": found})


def test_exclusions_match_names_children_wildcards_and_regular_expressions() -> None:
    exclude = ("lm_head", "model.layers.0*", "re:.*router$", "model.layers.3.mlp")
    info = QuantizationInfo("modelopt", "FP8", None, exclude, "tensor", "static")
    assert info.excludes("lm_head")
    assert info.excludes("model.layers.0.mlp.up_proj")
    assert info.excludes("model.layers.5.router")
    assert info.excludes("model.layers.3.mlp.up_proj")
    assert not info.excludes("model.layers.1.mlp.up_proj")
    assert not info.excludes("model.layers.3.mlp2")


def test_a_broken_regular_expression_is_refused() -> None:
    info = QuantizationInfo("modelopt", "FP8", None, ("re:(",), "tensor", "static")
    with pytest.raises(errors.UnknownQuantization, match="regular expression"):
        info.excludes("lm_head")


@pytest.mark.parametrize("qformat", [*NOT_WRITTEN, "int3"])
def test_schemes_that_are_not_ready_are_refused_by_name(qformat: str) -> None:
    with pytest.raises(errors.Unsupported, match=f"{qformat}.*available: fp8, w4a8_mxfp4_fp8$"):
        find_scheme(qformat)
