"""`llmctl quantize --draft-model-dir` of a ReDrafter head: ModelOpt's fake-quantized head is the
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
from safetensors.torch import load_file
from support.mxfp4 import modelopt_weight
from support.quantized_heads import (
    CALIBRATED,
    HIDDEN,
    VOCAB,
    assert_is_modelopts,
    hidden_of,
    quantize,
    quantized_linears,
    rows_of,
)
from support.redrafter import RECURRENCES, Tensors, TorchHead, make_head, save_as, save_head

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import read_plan
from llmctl.builder.heads.redrafter.names import FIRST, NEXT
from llmctl.quantize.layers import import_modelopt
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.step import pack_continued

EXIT, STEPS = 64, {"silu": 5, "linear": 2, "sum": 5}  # the converted head says 2


@pytest.fixture(scope="module")
def target(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def hidden(target: Path) -> torch.Tensor:
    return hidden_of(target)


def head_of(recurrence: str) -> Tensors:
    """With an input projection, but for the converted one."""
    exit_dim = 2 * HIDDEN if recurrence == "linear" else EXIT
    tensors = make_head(HIDDEN, VOCAB, exit_dim=exit_dim, is_rnn=recurrence != "sum", num_layers=2)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


class Linears(torch.nn.Module):
    """The linears of a head's tensors, called through a TorchHead along given tokens."""

    def __init__(self, recurrence: str, tensors: Tensors, embedding: torch.Tensor) -> None:
        super().__init__()
        self.names = {n.removesuffix(".weight") for n in tensors if n.endswith(".weight")}
        for name in self.names:
            weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
            linear = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None)
            values = {"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()})
            linear.load_state_dict(values)
            # ModelOpt's presets leave out modules that are called lm_head
            self.add_module(name.replace(".", "_").replace("lm_head", "part"), linear)
        head: Any = TorchHead(recurrence, tensors, embedding)
        # The product alone is replaced, so that ModelOpt's quantizers see what a head computes.
        head._linear = lambda name, x: self.linear(name)(x)
        self.head = head

    def linear(self, name: str) -> Any:
        return self.get_submodule(name.replace(".", "_").replace("lm_head", "part"))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        state = None
        for step in range(tokens.shape[1]):
            state = self.head.state(tokens[:, step].tolist(), state)
            self.head.logits(hidden, state)


def by_modelopt(target: Path, recurrence: str, tensors: Tensors, hidden: torch.Tensor) -> Linears:
    """Fake-quantized on the rows that calibrate."""
    mtq = import_modelopt()
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    module = Linears(recurrence, tensors, table)
    steps = STEPS[recurrence]
    behind = rows_of(target)[:, 1:].unfold(1, steps, 1)[-CALIBRATED:]
    rows = hidden[-CALIBRATED:, : behind.shape[1]].float()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(
            module,
            copy.deepcopy(mtq.FP8_DEFAULT_CFG),
            lambda found: found(rows.flatten(0, 1), behind.flatten(0, 1)),
        )
    return module


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_scales_and_weights_are_modelopts_and_the_layout_stays(
    tmp_path: Path, target: Path, hidden: torch.Tensor, recurrence: str
) -> None:
    tensors = head_of(recurrence)
    folder = save_as(tmp_path / "head", recurrence, tensors)
    assert quantize(target, folder, tmp_path / "out") == 0
    is_converted = recurrence == "linear"
    file = "rank0.safetensors" if is_converted else "model.safetensors"
    found = load_file(tmp_path / "out" / file)
    module = by_modelopt(target, recurrence, tensors, hidden)
    assert len(quantized_linears(module)) == len(module.names)
    biases = {name for name in tensors if name.endswith("bias")}
    assert len(found) == 3 * len(module.names) + len(biases)
    for name in module.names:
        linear = module.linear(name)
        stored = name
        if is_converted:
            stored = "lm_head" if name == "lm_head.2" else name.replace("lm_head", "layers")
            stored = f"drafter.{stored}"
        # the head runs in BF16 there, in float32 here
        assert_is_modelopts(stored, linear, tensors[f"{name}.weight"], found, rtol=0.02)
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert after.pop("quantization_config")["quant_algo"] == "FP8" and after == before


class StoredHead(TorchHead):
    """A quantized head as its stored numbers say: products of FP8 inputs and dequantized weights,
    everything between them in BF16, as engines have it."""

    def __init__(self, folder: Path, plain: Tensors, target: Path) -> None:
        table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        super().__init__("silu", plain, table.bfloat16())
        self._stored = load_file(folder / "model.safetensors")

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale, bias = self._stored[f"{name}.input_scale"], self.tensors.get(f"{name}.bias")
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        found = codes @ self._weight(name).T * scale
        return (found if bias is None else found + bias.float()).bfloat16()

    def _weight(self, name: str) -> torch.Tensor:
        scale = self._stored[f"{name}.weight_scale"]
        if scale.ndim:  # MXFP4
            return modelopt_weight(self._stored, name)
        return self._stored[f"{name}.weight"].float() * scale


@pytest.mark.parametrize(("qformat", "bound"), [("fp8", 0.005), ("w4a8_mxfp4_fp8", 0.05)])
def test_an_engine_computes_what_the_stored_numbers_say(
    tmp_path: Path, target: Path, hidden: torch.Tensor, qformat: str, bound: float
) -> None:
    """Two steps on the compiled kernels. Sums of few different products often lie halfway between
    two BF16 numbers: with MXFP4 a rounded one may be the other. Beside the head as it was trained
    the errors are 0.06 and 0.15."""
    tensors = head_of("silu")
    folder = save_head(tmp_path / "head", tensors)
    assert quantize(target, folder, tmp_path / "out", "--qformat", qformat) == 0
    if qformat != "fp8":
        from modelopt.torch.quantization.qtensor import MXFP4QTensor

        stored = load_file(tmp_path / "out/model.safetensors")
        codes, scales = MXFP4QTensor.quantize(tensors["rnn_w.weight"], 32)
        assert torch.equal(stored["rnn_w.weight"], codes._quantized_data)
        assert torch.equal(stored["rnn_w.weight_scale"].flatten(), scales.flatten())
    request = BuildRequest(
        max_batch_size=4,
        speculative_decoding_mode="redrafter",
        redrafter_num_beams=2,
        redrafter_draft_len_per_beam=2,
        draft_model_dir=str(tmp_path / "out"),
    )
    run_build(plan_build(target, request, backend="cpu"), tmp_path / "engine")
    plan = read_plan(tmp_path / "engine")
    dtypes = {t.name: t.dtype for t in plan.tensors}
    for graph in (FIRST, NEXT):
        products = [op for op in plan.heads[graph].ops if op.op == "linear"]
        assert {dtypes[op.inputs["weight"]] for op in products} == {"float8_e4m3fn"}
    assert dtypes["lm_head.weight"] == "bfloat16"
    engine = open_cpu_engine(tmp_path / "engine")
    engine.allocate_kv_cache(2)
    engine.output("hidden")[:8].copy_(hidden[0, :8])
    head = StoredHead(tmp_path / "out", tensors, target)
    rows, tokens = [5, 1, 0], [7, 3, 9]
    found = engine.run_head(FIRST, packed(tokens, rows))
    kept, state = hidden[0, rows], head.state(tokens, None)
    assert error(found["logits"], head.logits(kept, state)) < bound
    engine.hand_on(FIRST, NEXT, 3)
    found = engine.run_head(NEXT, packed([4, 8], [2, 0]))
    state = head.state([4, 8], state[[2, 0]])
    assert error(found["logits"], head.logits(kept[[2, 0]], state)) < bound


def packed(tokens: list[int], rows: list[int]):
    return pack_continued(np.array(tokens, np.int32), np.array(rows, np.int32))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted.detach()).norm() / wanted.detach().norm())


def test_a_head_of_another_target_and_what_is_quantized_already_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_head(tmp_path / "other", make_head(64, VOCAB))
    assert quantize(target, folder, tmp_path / "out") == 1
    assert "hidden_size 64, the target has 96" in capsys.readouterr().err
    folder = save_head(tmp_path / "narrow", make_head(HIDDEN, VOCAB, exit_dim=40))
    assert quantize(target, folder, tmp_path / "out", "--qformat", "w4a8_mxfp4_fp8") == 2
    assert "lm_head.0.linear has 40 inputs; a multiple of 32" in capsys.readouterr().err
    folder = save_head(tmp_path / "good", make_head(HIDDEN, VOCAB))
    assert quantize(target, folder, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "5 steps" in said and "step 4 says what the target chooses" in said
    assert quantize(target, tmp_path / "out", tmp_path / "again") == 2
    assert "is quantized already (FP8)" in capsys.readouterr().err


def test_a_quantized_head_must_be_whole(tmp_path: Path, target: Path) -> None:
    """Without config.json's word, without a scale, with a scale of nothing."""
    from safetensors.torch import save_file

    from llmctl.builder.heads.redrafter.checkpoint import open_head
    from llmctl.errors import MissingTensor, UnexpectedTensor, Unsupported

    folder = save_head(tmp_path / "head", make_head(HIDDEN, VOCAB, exit_dim=EXIT))
    out = tmp_path / "out"
    assert quantize(target, folder, out) == 0
    stored, config = load_file(out / "model.safetensors"), (out / "config.json").read_text()
    plain = {n: v for n, v in json.loads(config).items() if n != "quantization_config"}
    (out / "config.json").write_text(json.dumps(plain))
    (out / "hf_quant_config.json").unlink()
    with pytest.raises(Unsupported, match="is F8_E4M3; heads in F32, BF16, F16 are read"):
        open_head(out)
    (out / "config.json").write_text(config)
    save_file({**stored, "rnn_u.bias_scale": torch.ones(1)}, out / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=r"rnn_u\.bias_scale"):
        open_head(out)
    save_file({**stored, "lm_head.7.linear.input_scale": torch.ones(1)}, out / "model.safetensors")
    with pytest.raises(UnexpectedTensor):
        open_head(out)
    del stored["rnn_w.input_scale"]
    save_file(stored, out / "model.safetensors")
    request = BuildRequest(speculative_decoding_mode="redrafter", draft_model_dir=str(out))
    with pytest.raises(MissingTensor, match=r"lacks drafter\.rnn_w\.input_scale"):
        plan_build(target, request, backend="cpu")
