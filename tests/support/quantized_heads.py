"""Heads that `llmctl quantize` quantizes on a tiny target's hidden rows, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.cli.main import execute
from llmctl.plugins.core.calls import StepInputs
from llmctl.quantize import calibration
from llmctl.runtime.engines.engine import Engine, open_cpu_engine

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


def assert_is_modelopts(
    name: str, linear: Any, before: torch.Tensor, found: Mapping[str, torch.Tensor], rtol: float
) -> None:
    """A linear of a quantized head beside ModelOpt's, `before` its weight. rtol: of the scale of
    activations, which are not the same to the last bit."""
    scale = linear.weight_quantizer.amax.float() / 448
    torch.testing.assert_close(found[f"{name}.weight_scale"], scale, rtol=0, atol=0)
    wanted = exported(before, scale)
    assert torch.equal(found[f"{name}.weight"].view(torch.uint8), wanted.view(torch.uint8))
    activation = linear.input_quantizer.amax.float() / 448
    torch.testing.assert_close(found[f"{name}.input_scale"], activation, rtol=rtol, atol=0)


def unchanged(head: Path, out: Path, quantized: Iterable[str]) -> set[str]:
    """The tensors of a head that quantizing it leaves as they are: all but the weights of these
    linears. config.json stays, too, but for what says that it is quantized."""
    before, found = (load_file(folder / "model.safetensors") for folder in (head, out))
    same = before.keys() - {f"{name}.weight" for name in quantized}
    assert all(torch.equal(found[name], before[name]) for name in same)
    described = [json.loads((folder / "config.json").read_text()) for folder in (head, out)]
    assert described[1].pop("quantization_config")["quant_algo"] == "FP8"
    assert described[0] == described[1]
    return same


def exported(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 by ModelOpt's exporter, of a BF16 weight."""
    from modelopt.torch.export.model_config import QUANTIZATION_FP8
    from modelopt.torch.export.quant_utils import to_quantized_weight

    found: torch.Tensor = to_quantized_weight(weight.detach().bfloat16(), scale, QUANTIZATION_FP8)
    return found


def eagle_engine(target: Path, head: Path, folder: Path) -> Engine:
    """On the compiled kernels, with room for one request."""
    request = BuildRequest(
        max_batch_size=4, speculative_decoding_mode="eagle", draft_model_dir=str(head)
    )
    run_build(plan_build(target, request, backend="cpu"), folder)
    engine = open_cpu_engine(folder)
    engine.allocate_kv_cache(2)
    return engine


def first_step(engine: Engine, tokens: torch.Tensor, rows: Sequence[int]) -> StepInputs:
    """Of an EAGLE head behind a prompt that the target has read: `tokens` follow its features."""
    count = len(tokens)
    places = np.arange(count, dtype=np.int32)
    return StepInputs(
        token_ids=tokens.numpy().astype(np.int32),
        position_ids=places,
        cu_q=np.array([0, count], np.int32),
        kv_len=np.array([count], np.int32),
        block_tables=np.array([[1]], np.int32),
        slot_mapping=places + np.int32(engine.tokens_per_block),
        logit_rows=places[list(rows)],
    )
