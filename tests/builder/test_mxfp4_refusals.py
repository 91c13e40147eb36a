"""MXFP4 checkpoints that are not built, and what is said of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint import edit
from support.mxfp4 import (
    DOWN,
    LAYER,
    SHAPE,
    Tensors,
    modelopt_weight,
    plan_cuda,
    values_of,
)

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine
from llmctl.builder.planted import LoadFormat
from llmctl.errors import (
    BadTensorShape,
    BadTensorValue,
    LlmctlError,
    MissingTensor,
    UnknownQuantization,
    Unsupported,
)
from llmctl.plugins.schemes.mxfp4.packing import unpack


@pytest.fixture
def editable(mxfp4_checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the plain checkpoint."""
    return Path(shutil.copytree(mxfp4_checkpoints("plain"), tmp_path / "checkpoint"))


# ---- what is refused ----


def configure(folder: Path, **fields: Any) -> Path:
    """Change fields of the quantization, which config.json alone then describes."""
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def forget_quantization(folder: Path) -> Path:
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refuse(
    folder: Path, error: type[LlmctlError], text: str, backend: str = "cpu", **fields: Any
) -> LlmctlError:
    """Building raises `error` and leaves nothing beside the checkpoint."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=text) as caught:
        engine = plan_build(
            folder, BuildRequest(**fields), backend=backend, with_binaries=backend != "cuda"
        )
        if backend == "cuda":
            for source in engine.sources.values():
                list(source.chunks(engine.checkpoint))
        else:
            run_build(engine, folder.parent / "engine")
    assert sorted(folder.parent.iterdir()) == before
    return caught.value


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cuda"])


@BACKENDS
def test_a_power_that_is_nan(backend: str, editable: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][5, 3] = 255

    folder = edit(editable, change)
    refuse(folder, BadTensorValue, f"{DOWN}.weight_scale holds NaN", backend, dtype="bfloat16")


@BACKENDS
def test_a_block_too_far_below_its_row(backend: str, editable: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][70] = 120
        tensors[f"{DOWN}.weight_scale"][70, 4] = 105  # its codes are columns 128 to 159
        tensors[f"{DOWN}.weight"][70, 64:80] = 0
        tensors[f"{DOWN}.weight"][70, 71] = 0x10  # one half

    text = rf"{DOWN}.weight: block 4 of row 70 is 2\*\*15 below the row's largest; up to 2\*\*14"
    error = refuse(edit(editable, change), BadTensorValue, text, backend, dtype="bfloat16")
    assert "--qformat w4a8_mxfp4_fp8" in error.fix


@pytest.mark.parametrize(("below", "code"), [(14, 0x7F), (15, 0x80), (120, 0x08)])
def test_a_low_block_is_taken_where_e4m3_holds_it(
    below: int, code: int, editable: Path, build_engine, open_test_engine
) -> None:
    """2**14 below with any codes; further below with zeros of either sign."""

    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][70] = 120
        tensors[f"{DOWN}.weight_scale"][70, 4] = 120 - below
        tensors[f"{DOWN}.weight"][70, 64:80] = code

    stored = load_file(edit(editable, change) / "model.safetensors")
    _, weights = open_engine(build_engine(editable))
    found = weights[f"{DOWN}.weight"].float() * weights[f"{DOWN}.weight_scale"][:, None]
    assert torch.equal(found, modelopt_weight(stored, DOWN))
    engine = plan_cuda(editable)
    packed = unpack(values_of(engine, f"{DOWN}.weight"), 96, 288).view(torch.uint8)
    assert torch.equal(packed, weights[f"{DOWN}.weight"].view(torch.uint8))


def as_fp8(tensors: Tensors, module: str) -> None:
    """Store a linear as ModelOpt's FP8 instead."""
    weight = modelopt_weight(tensors, module)
    scale = weight.abs().max() / 448
    tensors[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = scale


def as_plain(tensors: Tensors, module: str) -> None:
    """Store a linear unquantized instead."""
    tensors[f"{module}.weight"] = modelopt_weight(tensors, module)
    for name in ("weight_scale", "input_scale"):
        del tensors[f"{module}.{name}"]


def test_an_fp8_weight_where_four_bits_are_declared(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_fp8(tensors, DOWN))
    text = rf"{DOWN}.weight in .* is F8_E4M3, but the config declares W4A8_MXFP4_FP8"
    refuse(folder, BadTensorShape, text)


def test_a_plain_weight_where_four_bits_are_declared(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_plain(tensors, DOWN))
    refuse(folder, BadTensorShape, rf"{DOWN}.weight in .* is F32, but the config declares W4A8")


def test_four_bits_where_fp8_is_declared(editable: Path) -> None:
    text = r"q_proj.weight in .* is U8, but the config declares FP8"
    refuse(configure(editable, quant_algo="FP8"), BadTensorShape, text)


def test_four_bits_where_nothing_is_declared(editable: Path) -> None:
    text = "q_proj.weight in .* is U8, but neither config.json nor hf_quant_config.json"
    error = refuse(forget_quantization(editable), UnknownQuantization, text)
    assert error.fix == "fetch the config files again"


def test_four_bits_that_the_config_excludes(editable: Path) -> None:
    folder = configure(editable, ignore=["lm_head", "*.o_proj"])
    refuse(folder, BadTensorShape, r"o_proj.weight in .* is U8, but the config excludes it")


@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_missing_scale_is_named_with_the_probable_reason(editable: Path, scale: str) -> None:
    folder = edit(editable, lambda tensors: tensors.__delitem__(f"{DOWN}.{scale}"))
    refuse(folder, MissingTensor, rf"declares W4A8_MXFP4_FP8 .* lacks {DOWN}.{scale}; probably")


@pytest.mark.parametrize("shape", [(96, 18), (96, 8), (864,), ()])
def test_powers_of_another_shape(editable: Path, shape: tuple[int, ...]) -> None:
    scales = torch.full(shape, 120, dtype=torch.uint8)
    folder = edit(editable, lambda tensors: tensors.update({f"{DOWN}.weight_scale": scales}))
    text = rf"{DOWN}.weight_scale .*shape \{list(shape)}; .*implies \[96, 9\]"
    refuse(folder, BadTensorShape, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_powers_of_another_type(editable: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"] = torch.ones(96, 9).to(dtype)

    refuse(edit(editable, change), BadTensorShape, f"{DOWN}.weight_scale .* U8")


def test_codes_of_another_shape(editable: Path) -> None:
    codes = torch.zeros(96, 288, dtype=torch.uint8)  # one a byte
    folder = edit(editable, lambda tensors: tensors.update({f"{DOWN}.weight": codes}))
    refuse(folder, BadTensorShape, r"shape \[96, 288\]; .*implies \[96, 144\]")


def test_an_input_scale_that_cannot_be(editable: Path) -> None:
    folder = edit(
        editable, lambda tensors: tensors.update({f"{DOWN}.input_scale": torch.tensor(0.0)})
    )
    refuse(folder, BadTensorValue, f"{DOWN}.input_scale holds 0.0")


def test_columns_that_blocks_do_not_divide(new_model, save) -> None:
    folder = save(new_model("llama", **(SHAPE | {"intermediate_size": 112})))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "W4A8_MXFP4_FP8",
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    text = r"down_proj.weight has 112 columns .*has blocks of 32"
    refuse(folder, BadTensorShape, text)
    with pytest.raises(BadTensorShape, match=text):  # from config.json alone, too
        plan_cuda(folder, load_format=LoadFormat("dummy"))


def test_parts_of_one_merged_linear_that_are_quantized_differently(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_plain(tensors, f"{LAYER}.self_attn.k_proj"))
    configure(folder, ignore=["lm_head", f"{LAYER}.self_attn.k_proj"])
    error = refuse(folder, Unsupported, r"q_proj, .*k_proj, .*v_proj are quantized differently")
    assert "excluding all of them or none" in error.fix


def test_linears_of_both_kinds_in_one_checkpoint_cannot_be_declared(editable: Path) -> None:
    module = f"{LAYER}.self_attn.k_proj"
    folder = edit(editable, lambda tensors: as_fp8(tensors, module))
    refuse(folder, BadTensorShape, rf"{module}.weight in .* is F8_E4M3")
    configure(folder, quant_algo="MIXED_PRECISION")
    refuse(folder, UnknownQuantization, "MIXED_PRECISION")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_backends_without_a_product_of_four_bits_refuse(
    backend: str, editable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmctl.builder.build.find_package", lambda _: object())
    text = f"weights in W4A8_MXFP4_FP8 are refused: the {backend} backend has no product of them"
    error = refuse(editable, Unsupported, text, backend, dtype="bfloat16")
    assert error.fix.startswith("--backend cuda")
