"""The layer-by-layer path writes, bit for bit, what ModelOpt's whole-model export writes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.quantizer import run_quantization

MXFP4 = "w4a8_mxfp4_fp8"
FAMILIES = ["llama", "llama-tied-7-heads", "mistral-window", "qwen2-mixed-window", "qwen3-tied"]


def stored_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same_tensors(a: Checkpoint, b: Checkpoint) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    described = {n: (i.dtype, i.shape) for n, i in a.tensors.items()}
    assert described == {n: (i.dtype, i.shape) for n, i in b.tensors.items()}
    different = [n for n in a.tensors if stored_bytes(a.read(n)) != stored_bytes(b.read(n))]
    assert not different


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    a, b = Checkpoint.open(ours), Checkpoint.open(theirs)
    assert_same_tensors(a, b)
    assert a.config == b.config
    key = "quantization_config"
    assert list(a.config[key]) == list(b.config[key])  # in ModelOpt's order too
    for name in ("hf_quant_config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_and_config_field_equals_modelopts_export(
    quantized: Callable[..., Path],
    modelopt_export: Callable[..., Path],
    family: str,
    kv_cache_dtype: str,
) -> None:
    ours = quantized(family, kv_cache_dtype=kv_cache_dtype)
    assert_same_checkpoint(ours, modelopt_export(family, kv_cache_dtype))
    scales = [n for n in Checkpoint.open(ours).tensors if n.endswith(("k_scale", "v_scale"))]
    assert len(scales) == (4 if kv_cache_dtype == "fp8" else 0)  # one K and one V in two layers


def test_a_mistral_with_layer_types_is_calibrated_with_the_window_of_each_layer(
    quantized: Callable[..., Path], modelopt_export: Callable[..., Path]
) -> None:
    family = "mistral-mixed-window"  # AutoModel exports it as a Ministral: its config is another
    ours = Checkpoint.open(quantized(family, kv_cache_dtype="fp8"))
    assert_same_tensors(ours, Checkpoint.open(modelopt_export(family, "fp8")))


def test_a_mistral_with_layer_types_and_no_window_is_a_mistral(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Ministral's class, which AutoModel takes for it, fails on a prompt without a window."""
    kinds = {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}
    outputs = []
    for name, fields in (("typed", kinds), ("plain", {"sliding_window": None})):
        source = Path(shutil.copytree(checkpoints("mistral-window"), tmp_path / name))
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | fields))
        run_quantization(plan_tiny(source, tmp_path / f"{name}-fp8", kv_cache_dtype="fp8"))
        outputs.append(Checkpoint.open(tmp_path / f"{name}-fp8"))
    assert_same_tensors(*outputs)


@pytest.mark.parametrize("is_other", [True, False], ids=["another", "a copy"])
def test_the_output_projection_of_a_tied_checkpoint_is_kept_where_it_differs(
    editable: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    is_other: bool,
) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1] += float(is_other)

    source = editable(add_head, "qwen3-tied")
    run_quantization(plan_tiny(source, tmp_path / "out", kv_cache_dtype="none"))
    result = Checkpoint.open(tmp_path / "out")
    assert result.config["tie_word_embeddings"] == (not is_other)
    assert ("lm_head.weight" in result.tensors) == is_other
    if is_other:
        wanted = Checkpoint.open(source).read("lm_head.weight")
        assert torch.equal(result.read("lm_head.weight"), wanted)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_other_source_dtypes_equal_modelopts_export(
    quantized: Callable[..., Path], modelopt_export: Callable[..., Path], stored: torch.dtype
) -> None:
    ours = quantized("llama", stored, kv_cache_dtype="fp8")
    assert_same_checkpoint(ours, modelopt_export("llama", "fp8", stored))


def test_a_cast_with_dtype_equals_modelopts_export_of_the_cast_model(
    quantized: Callable[..., Path], modelopt_export: Callable[..., Path]
) -> None:
    ours = quantized("qwen3-tied", torch.float32, kv_cache_dtype="fp8", dtype="bfloat16")
    theirs = modelopt_export("qwen3-tied", "fp8", torch.float32, torch.bfloat16)
    assert_same_checkpoint(ours, theirs)


@pytest.mark.parametrize(
    ("family", "stored", "kv_cache_dtype"),
    [
        ("llama", torch.bfloat16, "fp8"),
        ("llama", torch.float32, "none"),
        ("mistral-window", torch.float16, "fp8"),
        ("qwen2-mixed-window", torch.bfloat16, "none"),
        ("qwen3-tied", torch.bfloat16, "fp8"),
    ],
)
def test_every_tensor_and_config_field_of_mxfp4_equals_modelopts_export(
    quantized: Callable[..., Path],
    modelopt_export: Callable[..., Path],
    family: str,
    stored: torch.dtype,
    kv_cache_dtype: str,
) -> None:
    ours = quantized(family, stored, kv_cache_dtype=kv_cache_dtype, qformat=MXFP4)
    theirs = modelopt_export(family, kv_cache_dtype, stored, qformat=MXFP4)
    assert_same_checkpoint(ours, theirs)
    name = "model.layers.1.mlp.down_proj."
    tensors = Checkpoint.open(ours).tensors
    found = [tensors[name + part] for part in ("weight", "weight_scale", "input_scale")]
    assert [(info.dtype, info.shape) for info in found] == [
        ("U8", (96, 80)),
        ("U8", (96, 5)),
        ("F32", ()),
    ]


def test_what_calibration_measures_does_not_depend_on_the_scheme(
    quantized: Callable[..., Path],
) -> None:
    fp8, mxfp4 = (
        Checkpoint.open(quantized("llama", kv_cache_dtype="fp8", qformat=qformat))
        for qformat in ("fp8", MXFP4)
    )
    names = [n for n in fp8.tensors if n.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(names) == 2 * (7 + 2)
    assert [fp8.read(n) for n in names] == [mxfp4.read(n) for n in names]


@pytest.mark.parametrize(("qformat", "dtype"), [("fp8", "F8_E4M3"), (MXFP4, "U8")])
def test_a_quantized_lm_head_equals_modelopts_export(
    quantized: Callable[..., Path],
    modelopt_export: Callable[..., Path],
    qformat: str,
    dtype: str,
) -> None:
    ours = quantized("llama", kv_cache_dtype="fp8", quantize_lm_head=True, qformat=qformat)
    assert Checkpoint.open(ours).info("lm_head.weight").dtype == dtype
    assert_same_checkpoint(ours, modelopt_export("llama", has_head=True, qformat=qformat))


def test_shards_hold_the_same_bytes_as_one_file(
    quantized: Callable[..., Path], modelopt_export: Callable[..., Path]
) -> None:
    ours = quantized("llama", kv_cache_dtype="fp8", max_shard_bytes=80_000)
    shards = sorted(ours.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 80_000 + 8_000 for shard in shards)  # data + header
    assert_same_checkpoint(ours, modelopt_export("llama", "fp8"))
    loaded: dict[str, torch.Tensor] = {}
    for shard in shards:  # the safetensors library accepts our files
        loaded |= load_file(shard)
    assert loaded.keys() == Checkpoint.open(ours).tensors.keys()


def test_results_do_not_depend_on_the_batch_size(quantized: Callable[..., Path]) -> None:
    one = quantized("llama", kv_cache_dtype="fp8", batch_size=1)
    assert_same_checkpoint(quantized("llama", kv_cache_dtype="fp8"), one)


def as_compressed_tensors(source: Path, output: Path) -> None:
    """Relabel a ModelOpt FP8 checkpoint so that compressed-tensors, another reader, runs it."""
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("hf_quant_config.json"))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        name = name.replace("k_proj.k_scale", "k_scale").replace("v_proj.v_scale", "v_scale")
        tensors[name] = tensor.reshape(1) if tensor.ndim == 0 else tensor
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    number = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": number, "input_activations": number}
        },
        "kv_cache_scheme": number,
    }
    (output / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
def test_another_reader_gives_the_logits_of_modelopts_fake_quantized_model(
    quantized: Callable[..., Path],
    modelopt_model: Callable[..., Any],
    checkpoints: Callable[..., Path],
    tmp_path: Path,
    family: str,
) -> None:
    from transformers import AutoModelForCausalLM

    as_compressed_tensors(quantized(family, torch.float32, kv_cache_dtype="fp8"), tmp_path / "ct")
    ids = torch.randint(0, 384, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compressed-tensors' own deprecations
        reader = AutoModelForCausalLM.from_pretrained(tmp_path / "ct").eval()
        got = reader(input_ids=ids, use_cache=False).logits.float()
        wanted = modelopt_model(family, "fp8", torch.float32)(
            input_ids=ids, use_cache=False
        ).logits.float()
        plain = AutoModelForCausalLM.from_pretrained(checkpoints(family, torch.float32)).eval()
        exact = plain(input_ids=ids, use_cache=False).logits.float()
    quantization_error = (wanted - exact).norm() / exact.norm()
    of_prompts = (got - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
    assert quantization_error > 1e-2  # the oracle does quantize
    # Both compute in float32, so only the order of sums differs: 1e-5 where no value sits on an
    # FP8 rounding border. One that falls to the other side, about once in ten of these prompts,
    # changes all tokens of its prompt that see it, by up to 0.07. A scale lost or misplaced is as
    # large as the quantization error itself, in every prompt.
    assert of_prompts.median() <= 1e-4
    assert of_prompts.max() < quantization_error / 2
