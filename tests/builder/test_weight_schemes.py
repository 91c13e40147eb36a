"""A weight scheme is a row in each of four tables: one more (`support/flipped_scheme.py`) goes from
`llmctl quantize` to logits, on the cpu and packed for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.flipped_scheme import FORM, SCHEME, register
from support.mxfp4 import CUDA_LIMITS, VOCAB, plan_cuda

from llmctl.builder.build import run_build
from llmctl.builder.planted import LoadFormat
from llmctl.cli.inspect.checkpoint import describe_checkpoint
from llmctl.errors import Unsupported
from llmctl.quantize.format import CONFIG_FILE, QUANT_CONFIG_FILE
from llmctl.quantize.plan import QuantizeOptions, plan_quantization
from llmctl.quantize.quantizer import run_quantization


@pytest.fixture
def quantized(mxfp4_checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    """quantized(qformat) -> the folder that `llmctl quantize` writes of one small model."""

    def quantize(qformat: str) -> Path:
        options = QuantizeOptions(
            mxfp4_checkpoints("source"),
            tmp_path / qformat,
            qformat=qformat,
            calib_size=4,
            calib_max_seq_length=64,
        )
        run_quantization(plan_quantization(options))
        return tmp_path / qformat

    return quantize


def test_a_scheme_that_no_table_has_is_refused(quantized) -> None:
    with pytest.raises(Unsupported, match="--qformat flipped is not a known format"):
        quantized(SCHEME.qformat)


def test_its_rows_alone_take_a_scheme_from_quantize_to_logits(
    quantized, build_engine, open_test_engine, some_tokens, monkeypatch, tmp_path
) -> None:
    register(monkeypatch, "cpu", "cuda")
    plain, flipped = quantized("fp8"), quantized(SCHEME.qformat)
    stored = [load_file(folder / "model.safetensors") for folder in (plain, flipped)]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(~stored[1][name], stored[0][name].view(torch.uint8))
    assert describe_checkpoint(flipped)["quantization"]["algo"] == SCHEME.algo
    tokens = some_tokens(37, VOCAB)

    def logits(checkpoint: Path, program: str) -> torch.Tensor:
        engine = build_engine(checkpoint, dtype="bfloat16", **CUDA_LIMITS)
        return open_test_engine(engine, program).run(tokens)

    assert torch.equal(logits(flipped, "cpu"), logits(plain, "cpu"))
    wanted = logits(plain, "reference")
    run_build(plan_cuda(flipped), tmp_path / "cuda")
    # Planned without binaries, which the references do not need.
    monkeypatch.setattr("llmctl.builder.validation.kernels.check_kernels", lambda *_: None)
    assert torch.equal(open_test_engine(tmp_path / "cuda", "reference").run(tokens), wanted)


def test_a_plan_names_the_scheme_of_codes_that_several_schemes_keep_in_one_dtype(
    quantized, mxfp4_checkpoints, monkeypatch
) -> None:
    register(monkeypatch, "cuda")
    plans = {
        "flipped": plan_cuda(quantized(SCHEME.qformat)).plan,
        "mxfp4": plan_cuda(mxfp4_checkpoints("plain")).plan,
        None: plan_cuda(quantized("fp8")).plan,
    }
    for scheme, plan in plans.items():
        dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}
        layers = [op for op in plan.ops if op.op.startswith("packed_linear")][:-1]  # no head
        assert {op.attributes.get("scheme") for op in layers} == {scheme}
        packed = {dtypes[op.inputs["weight"]] for op in layers}
        assert packed == {"float8_e4m3fn" if scheme is None else "uint8"}


def test_weights_that_are_generated_have_the_form_of_those_that_are_read(
    quantized, monkeypatch, tmp_path
) -> None:
    register(monkeypatch, "cuda")
    source = quantized(SCHEME.qformat)
    (tmp_path / "config").mkdir()
    for name in (CONFIG_FILE, QUANT_CONFIG_FILE):
        (tmp_path / "config" / name).write_bytes((source / name).read_bytes())
    made = plan_cuda(tmp_path / "config", LoadFormat("dummy"))
    assert made.plan.ops == plan_cuda(source).plan.ops
    shapes = {tuple(t.shape)[2:] for t in made.plan.tensors if t.dtype == FORM.dtype}
    assert shapes == {(64, 128)}


def test_a_backend_refuses_a_scheme_that_its_row_does_not_name(
    quantized, build_engine, monkeypatch
) -> None:
    register(monkeypatch)
    with pytest.raises(Unsupported, match="weights in FLIPPED_FP8 are refused: the cpu backend"):
        build_engine(quantized(SCHEME.qformat))
