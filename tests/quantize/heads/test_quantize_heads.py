"""`llmctl quantize --draft-model-dir`: ModelOpt's fake-quantized heads are the oracle."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.medusa import Tensors, make_heads, save_heads, torch_heads
from support.quantized_heads import (
    CALIBRATED,
    HIDDEN,
    KINDS,
    ROW_LENGTH,
    VOCAB,
    assert_is_modelopts,
    exported,
    hidden_of,
    quantize,
    quantized_linears,
)

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import read_plan
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.quantize.layers import import_modelopt
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, open_cpu_engine
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.step import pack_rows

HEADS = 2


@pytest.fixture(scope="module")
def target(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def hidden(target: Path) -> torch.Tensor:
    return hidden_of(target)


def by_modelopt(tensors: Tensors, hidden: torch.Tensor) -> torch.nn.ModuleList:
    """Plain torch heads of BF16 weights, fake-quantized to FP8 on the rows that calibrate."""
    mtq = import_modelopt()
    modules = torch_heads(tensors).bfloat16().float()
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)

    def loop(found: Any) -> None:
        for head in found:
            head(hidden.float().flatten(0, 1)[-CALIBRATED * ROW_LENGTH :])

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(modules, config, loop)
        for linear in quantized_linears(modules).values():
            # As exported: divided by the scale in BF16, then rounded again.
            scale = linear.weight_quantizer.amax.float() / 448
            linear.weight.copy_(exported(linear.weight, scale).float() * scale)
    return modules


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_scales_and_weights_are_modelopts(
    tmp_path: Path, target: Path, hidden: torch.Tensor, num_layers: int
) -> None:
    tensors = make_heads(HEADS, num_layers, HIDDEN, VOCAB)
    folder = save_heads(tmp_path / "heads", {n: t.bfloat16() for n, t in tensors.items()})
    assert quantize(target, folder, tmp_path / "out") == 0
    modules = by_modelopt(tensors, hidden)
    found = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    linears = quantized_linears(modules)
    assert set(found) == {
        *(f"{name}.{kind}" for name in linears for kind in KINDS),
        *(n for n in tensors if n.endswith("bias")),
    }
    for name, linear in linears.items():
        # batches of another size give hidden rows that differ in the last bits
        assert_is_modelopts(name, linear, tensors[f"{name}.weight"], found, rtol=0.01)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8"


@pytest.mark.parametrize(("backend", "family"), [("cpu", "llama"), ("cuda", "llama-tied-7-heads")])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["bf16 target", "fp8 target"])
def test_an_engine_computes_what_the_fake_quantized_heads_do(
    tmp_path: Path,
    checkpoints: Callable[..., Path],
    quantized: Callable[..., Path],
    backend: str,
    family: str,
    is_quantized: bool,
) -> None:
    target = checkpoints(family)
    hidden = hidden_of(target)
    tensors = make_heads(HEADS, 1, hidden.shape[-1], VOCAB)
    folder = save_heads(tmp_path / "heads", tensors)
    assert quantize(target, folder, tmp_path / "out") == 0
    modules = by_modelopt(tensors, hidden)
    request = BuildRequest(
        max_batch_size=4,
        speculative_decoding_mode="medusa",
        draft_model_dir=str(tmp_path / "out"),
    )
    base = quantized(family) if is_quantized else target
    plan = plan_build(base, request, backend=backend, with_binaries=False)
    graph = plan.plan.heads["medusa"]
    assert [op.op for op in graph.ops].count("quantize") == 2 * HEADS
    dtypes = {t.name: t.dtype for t in plan.plan.tensors}
    products = [op for op in graph.ops if "weight" in op.inputs]
    assert {dtypes[op.inputs["weight"]] for op in products} == {"float8_e4m3fn"}
    others = {dtypes[op.inputs["weight"]] for op in plan.plan.ops if "linear" in op.op}
    assert ("float8_e4m3fn" in others) == is_quantized
    weights = {
        t.name: torch.cat(list(plan.sources[t.name].chunks(plan.checkpoint)))
        for t in plan.plan.tensors
        if t.kind == "weight"
    }
    arena = torch.zeros(plan.plan.arena_bytes, dtype=torch.uint8)
    bound = bind_plan(plan.plan, weights, arena)
    rows = hidden[0, :8]
    bound[plan.plan.outputs["hidden"]][:8] = rows
    (head,) = bind_heads(plan.plan, bound)
    spec = plan.plan.kv_cache
    cache = torch.zeros(kv_cache_shape(plan.plan, 2), dtype=getattr(torch, spec.dtype))
    step = pack_rows(8, [7, 2, 0])
    ReferenceProgram(head.calls, head.row_inputs).run(step, cache)
    outputs = head.outputs(step)
    for index, module in enumerate(modules):
        with torch.no_grad():
            wanted = module(rows[[7, 2, 0]].float())
        error = (outputs[f"logits.{index}"] - wanted).norm() / wanted.norm()
        assert error < 0.03, "an input in BF16 is sometimes rounded to the next FP8 number"


@pytest.mark.parametrize("qformat", ["fp8", "w4a8_mxfp4_fp8"])
def test_the_compiled_kernels_run_quantized_heads(
    tmp_path: Path, target: Path, hidden: torch.Tensor, qformat: str
) -> None:
    tensors = make_heads(HEADS, 1, HIDDEN, VOCAB)
    folder = save_heads(tmp_path / "heads", tensors)
    assert quantize(target, folder, tmp_path / "out", "--qformat", qformat) == 0
    request = BuildRequest(
        max_batch_size=4,
        speculative_decoding_mode="medusa",
        draft_model_dir=str(tmp_path / "out"),
    )
    run_build(plan_build(target, request, backend="cpu"), tmp_path / "engine")
    assert any(op.op == "quantize" for op in heads_of(tmp_path / "engine"))
    engine = open_cpu_engine(tmp_path / "engine")
    engine.allocate_kv_cache(2)
    engine.output("hidden")[:8].copy_(hidden[0, :8])
    found = engine.run_head("medusa", pack_rows(engine.max_num_rows, [5, 1]))
    is_fp8 = qformat == "fp8"  # ModelOpt's MXFP4 needs a GPU: the heads as trained, then
    modules = by_modelopt(tensors, hidden) if is_fp8 else torch_heads(tensors)
    for index, module in enumerate(modules):
        with torch.no_grad():
            wanted = module(hidden[0, [5, 1]].float())
        error = (found[f"logits.{index}"] - wanted).norm() / wanted.norm()
        assert error < (0.03 if is_fp8 else 0.2)


def heads_of(folder: Path):
    return read_plan(folder).heads["medusa"].ops


def test_heads_that_share_the_targets_projection_keep_it_as_it_is(
    tmp_path: Path, target: Path
) -> None:
    tensors = {n: t for n, t in make_heads(HEADS, 1, HIDDEN, VOCAB).items() if "linear" in n}
    folder = save_heads(tmp_path / "heads", tensors, '{"version": "2"}')
    assert quantize(target, folder, tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert {name.split(".", 2)[2] for name in found} == {
        *(f"linear.{kind}" for kind in KINDS),
        "linear.bias",
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["version"] == "2"
    request = BuildRequest(
        speculative_decoding_mode="medusa", draft_model_dir=str(tmp_path / "out")
    )
    plan = plan_build(target, request, backend="cpu")
    dtypes = {t.name: t.dtype for t in plan.plan.tensors}
    assert dtypes["lm_head.weight"] == "bfloat16"
    assert dtypes["medusa_head.0.0.linear.weight"] == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype is for the target"),
        (("--quantize-lm-head",), "--quantize-lm-head is for the target"),
        (("--calib-size", "1"), "too few for 2 heads"),
        (("--calib-max-seq-length", "3"), "too few for 2 heads"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], options, found
) -> None:
    folder = save_heads(tmp_path / "heads", make_heads(HEADS, 1, HIDDEN, VOCAB))
    assert quantize(target, folder, tmp_path / "out", *options) != 0
    assert found in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_heads_of_another_target_and_quantized_heads_are_refused(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_heads(tmp_path / "heads", make_heads(HEADS, 1, 64, VOCAB))
    assert quantize(target, folder, tmp_path / "out") == 1
    assert "hidden_size 64, the target has 96" in capsys.readouterr().err
    folder = save_heads(tmp_path / "good", make_heads(HEADS, 1, HIDDEN, VOCAB))
    assert quantize(target, folder, tmp_path / "out") == 0
    assert quantize(target, tmp_path / "out", tmp_path / "again") == 2
    assert "is quantized already (FP8)" in capsys.readouterr().err
