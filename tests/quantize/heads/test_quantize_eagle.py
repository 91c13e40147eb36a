"""`llmctl quantize --draft-model-dir` of an EAGLE-3 head: ModelOpt's fake-quantized head is the
oracle, along the calibration text."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_heads import (
    CALIBRATED,
    HIDDEN,
    VOCAB,
    assert_is_modelopts,
    eagle_engine,
    first_step,
    quantize,
    quantized_linears,
    rows_of,
    unchanged,
)

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import EAGLE_EXTEND, EAGLE_FEATURES, EAGLE_NEXT, read_plan
from llmctl.builder.heads.eagle.checkpoint import check_head, open_head
from llmctl.errors import MissingTensor, UnexpectedTensor, Unsupported
from llmctl.quantize.layers import import_modelopt
from scripts.demo.eagle_head import EagleHead
from scripts.demo.eagle_head import EagleShape as DemoShape

TAPS, STEPS, INNER, DRAFT_VOCAB = (0, 1, 1), 5, 128, 200


@pytest.fixture(scope="module")
def target(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def features(target: Path) -> torch.Tensor:
    """[rows, length, 3 hidden] of the calibration text, by transformers' whole model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    with torch.no_grad():
        states = model(rows_of(target), output_hidden_states=True).hidden_states
    return torch.cat([states[tap] for tap in TAPS], -1).float()


def demo_head(target: Path) -> EagleHead:
    """A random one, of numbers that BF16 has."""
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    torch.manual_seed(3)
    kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    head = EagleHead(DemoShape(HIDDEN, INNER, 6, 2, TAPS), table, kept)
    for parameter in head.parameters():
        parameter.data.copy_(parameter.data.bfloat16().float())
    return head


class Steps(torch.nn.Module):
    """All steps of a head along a text. ModelOpt's presets leave out what is called lm_head."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head, self.part = head, head.lm_head
        del head.lm_head
        self.names = {name: name.removeprefix("head.") for name in dict(self.named_modules())}
        self.names["part"] = "lm_head"

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, steps: int = STEPS) -> Any:
        outs = self.head.unroll(features[None], tokens[None], steps)
        return [self.part(self.head.norm(out[0])) for out in outs]


def by_modelopt(target: Path, features: torch.Tensor) -> Steps:
    """Fake-quantized on the rows that calibrate."""
    mtq, module, text = import_modelopt(), Steps(demo_head(target)), rows_of(target)
    count = text.shape[1] - STEPS

    def loop(found: Any) -> None:
        for row in range(len(text) - CALIBRATED, len(text)):
            found(features[row, :count], text[row, 1:])

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(module, copy.deepcopy(mtq.FP8_DEFAULT_CFG), loop)
    return module


def test_scales_and_weights_are_modelopts_and_the_layout_stays(
    tmp_path: Path, target: Path, features: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_head(target).write(tmp_path / "head", "llama")
    assert quantize(target, tmp_path / "head", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "5 steps" in said and "step 4 says what the target chooses" in said
    before, found = (load_file(tmp_path / d / "model.safetensors") for d in ("head", "out"))
    module = by_modelopt(target, features)
    linears = quantized_linears(module)
    assert len(linears) == 9
    for path, linear in linears.items():
        name = module.names[path]
        # the head runs in BF16 there, in float32 here
        assert_is_modelopts(name, linear, before[f"{name}.weight"], found, rtol=0.03)
    names = [module.names[path] for path in linears]
    same = unchanged(tmp_path / "head", tmp_path / "out", names)
    assert len(same) == 6 and len(found) == 3 * 9 + 6
    assert quantize(target, tmp_path / "out", tmp_path / "again") == 2
    assert "is quantized already (FP8)" in capsys.readouterr().err


@pytest.mark.parametrize(("qformat", "bound"), [("fp8", 0.07), ("w4a8_mxfp4_fp8", 0.3)])
def test_an_engine_computes_what_the_stored_numbers_say(
    tmp_path: Path, target: Path, features: torch.Tensor, qformat: str, bound: float
) -> None:
    """On the compiled kernels, beside ModelOpt's head; for MXFP4, which ModelOpt runs on GPUs
    alone, beside the head as it was trained."""
    demo_head(target).write(tmp_path / "head", "llama")
    assert quantize(target, tmp_path / "head", tmp_path / "out", "--qformat", qformat) == 0
    engine = eagle_engine(target, tmp_path / "out", tmp_path / "engine")
    plan = read_plan(tmp_path / "engine")
    dtypes = {t.name: t.dtype for t in plan.tensors}
    for graph in (EAGLE_EXTEND, EAGLE_NEXT):
        products = [op for op in plan.heads[graph].ops if op.op == "linear"]
        assert {dtypes[op.inputs["weight"]] for op in products} == {"float8_e4m3fn"}
    assert dtypes["lm_head.weight"] == "bfloat16"
    count, text = 20, rows_of(target)[0]
    source = [engine.output(f"layers.{tap}") for tap in TAPS]
    for at, tensor in enumerate(source):
        tensor[:count].copy_(features[0, :count, at * HIDDEN : (at + 1) * HIDDEN])
    engine.give_rows(EAGLE_EXTEND, EAGLE_FEATURES, source, np.arange(count))
    step = first_step(engine, text[1 : count + 1], [3, 11, 19])
    found = engine.run_head(EAGLE_EXTEND, step)["logits"]
    module = by_modelopt(target, features) if qformat == "fp8" else Steps(demo_head(target))
    with torch.no_grad():
        (own,) = module(features[0, :count], text[1 : count + 1], 1)
    wanted = own[[3, 11, 19]]
    found = found[:, module.head.kept]
    assert float((found - wanted).norm() / wanted.norm()) < bound


def test_a_quantized_head_must_be_whole(tmp_path: Path, target: Path) -> None:
    """Without config.json's word, with scales of nothing, without a scale."""
    demo_head(target).write(tmp_path / "head", "llama")
    out = tmp_path / "out"
    assert quantize(target, tmp_path / "head", out) == 0
    file, described = out / "model.safetensors", out / "config.json"
    stored, config = load_file(file), described.read_text()

    def check() -> None:
        check_head(open_head(out), TAPS, HIDDEN, VOCAB)

    check()
    plain = {n: v for n, v in json.loads(config).items() if n != "quantization_config"}
    described.write_text(json.dumps(plain))
    (out / "hf_quant_config.json").unlink()
    with pytest.raises((Unsupported, UnexpectedTensor)):
        check()
    described.write_text(config)
    for name in ("norm.weight_scale", "fc.bias_scale", "midlayer.mlp.left_proj.input_scale"):
        save_file({**stored, name: torch.ones(1)}, file)
        with pytest.raises(UnexpectedTensor, match=name):
            check()
    del stored["midlayer.mlp.up_proj.input_scale"]
    save_file(stored, file)
    request = BuildRequest(speculative_decoding_mode="eagle", draft_model_dir=str(out))
    with pytest.raises(MissingTensor, match=r"up_proj\.input_scale"):
        plan_build(target, request, backend="cpu")
