"""What quantize refuses, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmctl import errors
from llmctl.quantize import plan as plan_module
from llmctl.quantize.plan import QuantizeOptions
from llmctl.quantize.quantizer import run_quantization


def test_a_quantized_source_is_refused_by_name(
    quantized: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = quantized("llama", kv_cache_dtype="fp8")
    with pytest.raises(errors.Unsupported, match=r"quantized already \(modelopt, FP8\)"):
        plan_tiny(source, tmp_path / "out")


def test_an_output_that_exists_is_never_touched(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(errors.OutputExists):
        plan_tiny(checkpoints(), tmp_path / "out")


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.BadConfig, match="is not a folder"):
        plan_tiny(checkpoints(), tmp_path / "file" / "out")


def test_a_checkpoint_without_tokenizer_is_refused(
    editable: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    source = editable(lambda tensors: None)
    (source / "tokenizer.json").unlink()
    with pytest.raises(errors.TokenizerError, match="tokenizer.json"):
        plan_tiny(source, tmp_path / "out")


@pytest.mark.parametrize("qformat", ["fp8", "w4a8_mxfp4_fp8"])
def test_too_little_memory_or_disk_is_said_before_the_start(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qformat: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "free_memory_bytes", lambda: 1000)
        with pytest.raises(errors.OutOfMemory, match="GB are available"):
            plan_tiny(checkpoints(), tmp_path / "out", qformat=qformat)
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "require_space", lambda folder, size: asked.append(size))
        plan = plan_tiny(checkpoints(), tmp_path / "out", qformat=qformat, max_shard_bytes=80_000)
    run_quantization(plan)
    assert asked == [sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))]


def test_a_missing_extra_names_the_command_that_installs_it(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = plan_module.importlib.util.find_spec
    monkeypatch.setattr(
        plan_module.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "modelopt" else find_spec(name, *rest),
    )
    with pytest.raises(errors.MissingPackage, match="needs modelopt") as caught:
        plan_tiny(checkpoints(), tmp_path / "out")
    assert caught.value.fix == "pip install 'llmctl[quantize]'"


def test_a_cuda_device_that_is_absent_is_said_before_the_start(
    checkpoints: Callable[..., Path],
    plan_tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.NoDevice, match="no CUDA device"):
        plan_tiny(checkpoints(), tmp_path / "out", device="cuda")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("calib_size", 0),
        ("calib_max_seq_length", 0),
        ("batch_size", -1),
        ("tp_size", 0),
        ("kv_cache_dtype", "int4"),
        ("dtype", "fp64"),
        ("device", "tpu"),
        ("max_shard_bytes", 0),
    ],
)
def test_an_option_out_of_range_is_a_bad_config(option: str, value: Any) -> None:
    with pytest.raises(errors.BadConfig, match=option):
        QuantizeOptions(Path("a"), Path("b"), **{option: value})


def test_rows_are_no_longer_than_the_model_allows(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    plan = plan_tiny(checkpoints(), tmp_path / "out", calib_max_seq_length=10_000)
    assert plan.row_length == 256  # max_position_embeddings


def test_a_tied_head_cannot_be_quantized(
    checkpoints: Callable[..., Path], plan_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(errors.Unsupported, match="embedding"):
        plan_tiny(checkpoints("qwen3-tied"), tmp_path / "out", quantize_lm_head=True)
