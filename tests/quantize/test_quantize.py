"""Values at the edges: zeros, overflow, subnormals, NaN."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmctl import errors
from llmctl.builder.models import find_family
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.families import read_model
from llmctl.quantize.quantizer import run_quantization
from llmctl.quantize.schemes.fp8 import ZERO_WEIGHT_SCALE, quantize_weight

Q_PROJ = "model.layers.0.self_attn.q_proj"


V_PROJ = "model.layers.0.self_attn.v_proj"


def test_an_all_zero_weight_stays_exactly_zero(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: (t[Q_PROJ + ".weight"].zero_(), t[V_PROJ + ".weight"].zero_()))
    run_quantization(plan_tiny(source, tmp_path / "out", kv_cache_dtype="fp8"))
    result = Checkpoint.open(tmp_path / "out")
    assert not result.read(Q_PROJ + ".weight").float().any()
    assert result.read(Q_PROJ + ".weight_scale").item() == ZERO_WEIGHT_SCALE
    # V is zero, so what o_proj reads is zero as well: neither scale may be zero.
    assert result.read(V_PROJ + ".v_scale").item() == 1.0
    assert result.read("model.layers.0.self_attn.o_proj.input_scale").item() == 1.0
    for name, info in result.tensors.items():
        values = result.read(name).float()
        assert values.isfinite().all(), name
        assert not name.endswith("_scale") or (info.shape == () and values > 0), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_beyond_448_saturate_and_never_become_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([448, 464, 480, 1e4, -448, -500, 0.0, -0.0], dtype=dtype)
    stored = quantize_weight(values, torch.tensor(1.0)).float()
    assert stored.tolist() == [448, 448, 448, 448, -448, -448, 0, 0]


def test_a_rounded_up_quotient_of_the_largest_value_saturates() -> None:
    # amax / (amax / 448) may round above 448 in bfloat16; E4M3 has no infinity to fall into.
    for exponent in range(-20, 20):
        for mantissa in range(128):
            amax = torch.tensor((1 + mantissa / 128) * 2.0**exponent, dtype=torch.bfloat16)
            scale = amax.float() / 448
            stored = quantize_weight(amax.reshape(1), scale)
            assert stored.float().item() == 448


def test_subnormal_weights_stay_finite(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t[Q_PROJ + ".weight"].fill_(1e-40))
    run_quantization(plan_tiny(source, tmp_path / "out"))
    result = Checkpoint.open(tmp_path / "out")
    assert result.read(Q_PROJ + ".weight_scale").item() > 0
    assert result.read(Q_PROJ + ".weight").float().isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", [Q_PROJ + ".weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_weight_that_is_not_finite_is_refused_by_name(
    editable: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    name: str,
    value: float,
) -> None:
    source = editable(lambda t: t[name].view(-1)[3:4].fill_(value))
    with pytest.raises(errors.BadTensorValue, match=name):
        run_quantization(plan_tiny(source, tmp_path / "out"))
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_stored_in_another_kind_of_number_is_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    name = Q_PROJ + ".weight"
    source = editable(lambda t: t.__setitem__(name, t[name].to(dtype)))
    with pytest.raises(errors.BadTensorShape, match=f"{name} .* is (I8|F8_E4M3)"):
        run_quantization(plan_tiny(source, tmp_path / "out"))
    assert not list(tmp_path.glob("*out*"))


def test_keys_that_are_nan_are_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Infinite ones become NaN as they rotate."""
    source = editable(lambda t: t["model.layers.0.self_attn.k_proj.weight"].fill_(3e38))
    with pytest.raises(errors.BadTensorValue, match="not finite"):
        run_quantization(plan_tiny(source, tmp_path / "out", kv_cache_dtype="fp8"))
    assert not list(tmp_path.glob("*out*"))


def test_a_rope_that_would_compute_nan_is_refused_before_any_work(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: None)
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["factor"] = 0.0
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CorruptFile, match=r"rope_parameters: factor is 0\.0; a number"):
        plan_tiny(source, tmp_path / "out", kv_cache_dtype="fp8")


def test_activations_that_overflow_are_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda t: t["model.layers.0.mlp.down_proj.weight"].fill_(3e38))
    with pytest.raises(errors.BadTensorValue, match="layer 0"):
        run_quantization(plan_tiny(source, tmp_path / "out"))


def test_int8_kv_scales_are_measured_as_fp8_ones_are(quantized: Callable[..., Path]) -> None:
    fp8, int8 = (Checkpoint.open(quantized(kv_cache_dtype=name)) for name in ("fp8", "int8"))
    assert int8.quantization is not None and int8.quantization.kv_cache_algo == "INT8"
    for name in fp8.tensors:
        wanted, found = fp8.read(name), int8.read(name)
        if name.endswith(("k_scale", "v_scale")):
            wanted, found = wanted * 448, found * 127  # both are what calibration saw
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-6, atol=0)


def test_the_model_type_speaks_where_architectures_is_absent_as_for_build(
    checkpoints: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints(), folder)
    config = json.loads((folder / "config.json").read_text())
    (name,) = config.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(Checkpoint.open(folder)).model_class.__name__ == name
    assert find_family(config, "config.json").architecture == name
