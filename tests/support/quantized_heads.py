"""Heads that `llmctl quantize` quantizes on a tiny target's hidden rows, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmctl.cli.main import execute
from llmctl.quantize import calibration

VOCAB, HIDDEN, ROWS, ROW_LENGTH = 384, 96, 16, 48
CALIBRATED = ROWS - ROWS // 8  # the first rows measure
KINDS = ("weight", "weight_scale", "input_scale")


def rows_of(target: Path) -> torch.Tensor:
    """The calibration text [rows, length]."""
    return calibration.read_rows(
        "demo",
        target / "tokenizer.json",
        num_rows=ROWS,
        row_length=ROW_LENGTH,
        vocab=VOCAB,
        seed=1234,
    )


def hidden_of(target: Path) -> torch.Tensor:
    """[rows, length, hidden] of the calibration text, by transformers' whole model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    with torch.no_grad():
        return torch.cat([model.model(row[None]).last_hidden_state for row in rows_of(target)])


def quantize(target: Path, heads: Path, output: Path, *options: str) -> int:
    """The exit code of the command."""
    command = ["quantize", "--model-dir", str(target), "--draft-model-dir", str(heads)]
    command += ["--output-dir", str(output), "--calib-size", str(ROWS)]
    return execute([*command, "--calib-max-seq-length", str(ROW_LENGTH), *options])


def quantized_linears(modules: torch.nn.Module) -> dict[str, Any]:
    """Those that ModelOpt has quantizers for."""
    return {n: m for n, m in modules.named_modules() if hasattr(m, "weight_quantizer")}


def exported(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 by ModelOpt's exporter, of a BF16 weight."""
    from modelopt.torch.export.model_config import QUANTIZATION_FP8
    from modelopt.torch.export.quant_utils import to_quantized_weight

    found: torch.Tensor = to_quantized_weight(weight.detach().bfloat16(), scale, QUANTIZATION_FP8)
    return found
