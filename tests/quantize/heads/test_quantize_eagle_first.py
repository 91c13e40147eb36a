"""`llmctl quantize --draft-model-dir` of a head of EAGLE-1 of two layers. ModelOpt's calibration of
it along the text is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.eagle import save_head
from support.eagle_first import FirstHead
from support.quantized_heads import (
    CALIBRATED,
    HIDDEN,
    VOCAB,
    assert_is_modelopts,
    eagle_engine,
    first_step,
    hidden_of,
    quantize,
    quantized_linears,
    rows_of,
    unchanged,
)

from llmctl.builder.engine_format import EAGLE_EXTEND, EAGLE_FEATURES, EAGLE_NEXT, read_plan
from llmctl.quantize.layers import import_modelopt

STEPS = 5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def target(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("llama")


def head_of_bfloat16() -> FirstHead:
    head = FirstHead(True, **SIZES).eval()
    for parameter in head.parameters():
        parameter.data.copy_(parameter.data.bfloat16().float())
    return head


def write(folder: Path) -> Path:
    stored = {name: t.bfloat16() for name, t in head_of_bfloat16().tensors().items()}
    return save_head(folder, stored, **SIZES, draft_vocab_size=None, bias=True)


def by_modelopt(target: Path) -> FirstHead:
    """Fake-quantized on the rows that calibrate: all steps behind every place of a text."""
    mtq, head, text = import_modelopt(), head_of_bfloat16(), rows_of(target)[-CALIBRATED:]
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    hidden, after = hidden_of(target)[-CALIBRATED:].float(), table[text[:, 1:]]

    def loop(found: Any) -> None:
        for count in range(1, text.shape[1] - STEPS + 1):
            g = hidden[:, :count]
            for step in range(STEPS):
                out = found(g, after[:, : count + step])[:, -1:]
                g = torch.cat((g, out), 1)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(head, copy.deepcopy(mtq.FP8_DEFAULT_CFG), loop)
    return head


def test_scales_and_weights_are_modelopts_and_the_layout_stays(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(target, write(tmp_path / "head"), tmp_path / "out") == 0
    assert "5 steps" in capsys.readouterr().out
    before, found = (load_file(tmp_path / d / "model.safetensors") for d in ("head", "out"))
    linears = quantized_linears(by_modelopt(target))
    assert len(linears) == 1 + 2 * 7
    for name, linear in linears.items():
        # the head runs in BF16 there, in float32 here
        assert_is_modelopts(name, linear, before[f"{name}.weight"], found, rtol=0.02)
    same = unchanged(tmp_path / "head", tmp_path / "out", linears)
    assert same == {
        "fc.bias",
        "layers.0.post_attention_layernorm.weight",
        "layers.1.input_layernorm.weight",
        "layers.1.post_attention_layernorm.weight",
    }
    assert len(found) == 3 * 15 + 4
    assert quantize(target, tmp_path / "out", tmp_path / "again") == 2
    assert "is quantized already (FP8)" in capsys.readouterr().err


@pytest.mark.parametrize(("qformat", "bound"), [("fp8", 0.1), ("w4a8_mxfp4_fp8", 0.3)])
def test_an_engine_computes_what_the_stored_numbers_say(
    tmp_path: Path, target: Path, qformat: str, bound: float
) -> None:
    """On the compiled kernels, beside the head as it was trained."""
    assert quantize(target, write(tmp_path / "head"), tmp_path / "out", "--qformat", qformat) == 0
    engine = eagle_engine(target, tmp_path / "out", tmp_path / "engine")
    plan = read_plan(tmp_path / "engine")
    dtypes = {t.name: t.dtype for t in plan.tensors}
    for graph in (EAGLE_EXTEND, EAGLE_NEXT):
        products = {
            op.name.removeprefix(f"{graph}."): dtypes[op.inputs["weight"]]
            for op in plan.heads[graph].ops
            if op.op == "linear"
        }
        assert products.pop("lm_head") == "bfloat16", "the target's"
        assert set(products.values()) == {"float8_e4m3fn"} and "fc" in products
    count, text, rows = 20, rows_of(target)[0], [3, 11, 19]
    features = hidden_of(target)[0, :count]
    last = engine.output("layers.2")
    last[:count].copy_(features)
    engine.give_rows(EAGLE_EXTEND, EAGLE_FEATURES, [last], np.arange(count))
    step = first_step(engine, text[1 : count + 1], rows)
    found = engine.run_head(EAGLE_EXTEND, step)["logits"]
    stored = load_file(target / "model.safetensors")
    table, output = (stored[f"{n}.weight"].float() for n in ("model.embed_tokens", "lm_head"))
    with torch.no_grad():
        wanted = head_of_bfloat16()(features.float(), table[text[1 : count + 1]])[rows] @ output.T
    assert float((found - wanted).norm() / wanted.norm()) < bound
