"""`llmctl inspect` tells what a checkpoint folder holds, quantized ones with their scales."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LAYERS = 3


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """An FP8 checkpoint of one linear a layer, whose scales are known."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "hidden_size": 8,
        "vocab_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "ignore": ["lm_head"],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(16, 8, dtype=torch.bfloat16)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.up_proj"
        tensors[f"{name}.weight"] = torch.zeros(32, 8, dtype=torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.tensor(0.5 + layer)
        tensors[f"{name}.input_scale"] = torch.tensor(math.nan if layer == 1 else 2.0)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_tensors_of_all_layers_are_one_row(llmctl, quantized):
    found = json.loads(llmctl("inspect", quantized, "--json").out)
    assert found["num_tensors"] == 1 + 3 * LAYERS
    assert found["bytes"] == 16 * 8 * 2 + LAYERS * (32 * 8 + 4 + 4)
    (weight,) = [row for row in found["tensors"] if row["name"].endswith("up_proj.weight")]
    assert weight == {
        "name": "model.layers.N.mlp.up_proj.weight",
        "dtype": "float8_e4m3fn",
        "shape": [32, 8],
        "count": LAYERS,
        "layers": [0, 1, 2],
        "bytes": LAYERS * 32 * 8,
    }
    assert found["dtypes"]["float8_e4m3fn"] == {"tensors": LAYERS, "bytes": LAYERS * 256}


def test_the_scheme_is_that_of_the_config(llmctl, quantized):
    assert json.loads(llmctl("inspect", quantized, "--json").out)["quantization"] == {
        "method": "modelopt",
        "algo": "FP8",
        "kv_cache_algo": "FP8",
        "weight_scales": "tensor",
        "activation_scales": "static",
        "exclude": ["lm_head"],
    }


def test_scales_show_their_range_where_it_ends_and_values_that_are_no_numbers(llmctl, quantized):
    scales = json.loads(llmctl("inspect", quantized, "--json").out)["scales"]
    inputs, weights = sorted(scales, key=lambda row: row["name"])
    assert (weights["smallest"], weights["largest"]) == (0.5, 2.5)
    assert weights["largest_in"] == "model.layers.2.mlp.up_proj.weight_scale"
    assert (inputs["smallest"], inputs["largest"], inputs["non_finite"]) == (2.0, 2.0, 1)
    assert (inputs["count"], inputs["values_each"]) == (LAYERS, 1)


def test_the_table_names_what_matters(llmctl, quantized):
    lines = [" ".join(line.split()) for line in llmctl("inspect", quantized).out.splitlines()]
    assert "model LlamaForCausalLM, 3 layers, hidden 8, vocabulary 16" in lines
    assert "model.layers.N.mlp.up_proj.weight fp8 32x8 0-2 768 B" in lines
    assert "model.layers.N.mlp.up_proj.weight_scale 3 x 1 0.5 2.5" in lines
    assert "model.layers.N.mlp.up_proj.input_scale 3 x 1 2 2 1 not finite" in lines


def four_bits(folder: Path, last_power: int) -> Path:
    """`quantized` with MXFP4 codes: [32, 64] a layer, whose scales are 2**-3 and `last_power`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A8_MXFP4_FP8"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.up_proj"
        tensors[f"{name}.weight"] = torch.zeros(32, 32, dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.full((32, 2), 127 - 3, dtype=torch.uint8)
        tensors[f"{name}.input_scale"] = torch.tensor(2.0)
    tensors[f"{name}.weight_scale"][31, 1] = last_power
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_four_bits_are_two_values_a_byte(llmctl, quantized):
    found = json.loads(llmctl("inspect", four_bits(quantized, 124), "--json").out)
    assert found["num_values"] == 16 * 64 + LAYERS * (32 * 64 + 32 * 2 + 1)
    assert found["bytes"] == 16 * 64 * 2 + LAYERS * (32 * 32 + 32 * 2 + 4)
    assert found["quantization"]["algo"] == "W4A8_MXFP4_FP8"
    assert found["quantization"]["weight_scales"] == "group"


@pytest.mark.parametrize(
    ("stored", "largest", "non_finite"), [(127 + 5, 32.0, 0), (254, 2.0**127, 0), (255, 0.125, 1)]
)
def test_powers_of_two_are_told_as_the_multipliers_they_are(
    llmctl, quantized, stored, largest, non_finite
):
    four_bits(quantized, stored)
    scales = json.loads(llmctl("inspect", quantized, "--json").out)["scales"]
    (powers,) = [row for row in scales if row["name"].endswith("weight_scale")]
    assert (powers["smallest"], powers["largest"]) == (0.125, largest)
    assert (powers["values_each"], powers["non_finite"]) == (64, non_finite)
    told = "1 not finite" if non_finite else ""
    line = f"up_proj.weight_scale 3 x 64 0.125 {largest:.4g} {told}".strip()
    lines = [" ".join(text.split()) for text in llmctl("inspect", quantized).out.splitlines()]
    assert f"model.layers.N.mlp.{line}" in lines


def test_a_plain_checkpoint_has_no_scales(llmctl, engines):
    found = json.loads(llmctl("inspect", engines.target_checkpoint, "--json").out)
    assert found["quantization"] is None and found["scales"] == []
    assert found["model"]["architectures"] == ["LlamaForCausalLM"]
    assert "scales" not in llmctl("inspect", engines.target_checkpoint).out


def test_a_broken_checkpoint_is_refused_by_name(llmctl, quantized):
    path = quantized / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = llmctl("inspect", quantized)
    assert done.code == 1 and "error[CorruptFile]" in done.err


@pytest.mark.parametrize(
    ("head", "lines"),
    [
        ("demo-medusa", ["model medusa"]),
        ("demo-redrafter", ["model recurrent_drafting_drafter, hidden 384, vocabulary 4096"]),
        (
            "demo-eagle",
            [
                "model LlamaForCausalLMEagle3, 1 layer, hidden 384, vocabulary 4096",
                "attention 6 heads, 1 for keys and values",
            ],
        ),
    ],
)
def test_of_a_draft_head_what_its_config_says_is_shown(llmctl, repository, head, lines):
    done = llmctl("inspect", repository / "examples" / head)
    assert done.code == 0 and "None" not in done.out
    shown = [" ".join(line.split()) for line in done.out.splitlines()]
    assert shown[1 : 1 + len(lines)] == lines and shown[1 + len(lines)].startswith("weights")


def test_medusa_heads_need_no_config(llmctl, repository, tmp_path):
    shutil.copy(repository / "examples" / "demo-medusa" / "medusa_lm_head.safetensors", tmp_path)
    found = json.loads(llmctl("inspect", tmp_path, "--json").out)
    assert found["num_tensors"] == 12 and found["quantization"] is None
    assert found["bytes"] == 6 * (384 * 384 + 384) * 2


def test_what_is_no_folder_of_weights_is_named(llmctl, repository, tmp_path):
    example = repository / "examples" / "demo-medusa"
    config, absent, other = example / "config.json", tmp_path / "absent", tmp_path / "other"
    other.mkdir()
    shutil.copy(config, other)
    shutil.copy(example / "medusa_lm_head.safetensors", other / "adapter.safetensors")
    for path, name, said, fix in (
        (other, "CheckpointNotFound", "; it holds adapter.safetensors", "give a folder"),
        (config, "EngineNotFound", f"{config} is a file; an engine", f"give {example}"),
        (absent, "EngineNotFound", f"{absent} does not exist; an engine", "give an engine"),
    ):
        done = llmctl("inspect", path)
        assert done.code == 1 and done.err.startswith(f"error[{name}]: ") and said in done.err
        assert fix in done.err and ("fix: " in done.err) == bool(fix)


@pytest.mark.parametrize("names", [5, [5], {}])
def test_an_odd_architecture_is_shown_as_it_is(llmctl, engines, tmp_path, names):
    folder = tmp_path / "odd"
    shutil.copytree(engines.draft_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": names}))
    done = llmctl("inspect", folder)
    assert done.code == 0 and ("llama" if names != [5] else "5") in done.out.splitlines()[1]
