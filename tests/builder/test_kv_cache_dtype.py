"""Quantized KV caches: INT8 against ModelOpt's fake quantization, and what is refused by name."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cuda_build import HEADS, LIMITS

from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import read_engine_config
from llmctl.builder.engine_kernels import kernel_specs
from llmctl.builder.kv_cache import choose_kv_cache
from llmctl.builder.step_limits import step_limits
from llmctl.errors import BadConfig, MissingTensor, Unsupported
from llmctl.quantize.checkpoint import Checkpoint

FP8_TO_INT8 = 448 / 127  # both scales are the largest value seen, over the type's largest


@pytest.fixture
def exported(new_model, some_tokens, tmp_path):
    """exported(num_bits, **model fields) -> (a ModelOpt checkpoint with FP8 KV scales,
    logits of its fake-quantized model with keys and values in num_bits, as ModelOpt writes
    types)."""

    def make(num_bits, **fields) -> tuple[Path, torch.Tensor]:
        model = new_model("llama", gain=0.5, **fields)
        rows = torch.tensor(some_tokens(256)).view(4, 64)
        folder = tmp_path / "exported"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it warns about its own and torch's versions
            import modelopt.torch.quantization as mtq
            from modelopt.torch.export import export_hf_checkpoint

            config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
            config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
            mtq.quantize(model, config, lambda m: [m(row[None]) for row in rows])
            for name, module in model.named_modules():
                if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")):
                    module.num_bits = num_bits
            logits = model(torch.tensor([some_tokens(40)])).logits[0].float()
            for name, module in model.named_modules():
                if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")):
                    module.num_bits = (4, 3)
            export_hf_checkpoint(model, export_dir=folder)
        return folder, logits

    return make


def edit(folder: Path, algo: str | None, factor: float) -> None:
    """Give an exported checkpoint another kind of KV scales; None takes them away."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
        scale = tensors.pop(name)
        if algo is not None:
            tensors[name] = scale * factor
    save_file(tensors, path)
    for name, keys in (("hf_quant_config.json", ("quantization",)), ("config.json", ())):
        document = json.loads((folder / name).read_text())
        target = document
        for key in keys:
            target = target[key]
        if name == "config.json":
            target = target["quantization_config"]
            target.pop("kv_cache_scheme", None)
        target["kv_cache_quant_algo"] = algo
        (folder / name).write_text(json.dumps(document))


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_int8_logits_agree_with_modelopts_fake_quantized_model(
    exported, program_name, build_engine, open_test_engine, some_tokens
) -> None:
    folder, wanted = exported(8)
    edit(folder, "INT8", FP8_TO_INT8)
    engine = open_test_engine(build_engine(folder), program_name)
    assert engine.plan.kv_cache.dtype == "int8" and engine.kv_cache.dtype == torch.int8
    assert relative_l2(engine.run(some_tokens(40)), wanted) < 1e-2


def test_a_cuda_engine_with_int8_is_the_cpu_engine_and_has_kernels_for_it(
    exported, build_engine, open_test_engine, some_tokens, monkeypatch
) -> None:
    """Its plan runs with the references, which unpack weights and take fused operators apart. That
    the kernels compile is a test of each operator's."""
    monkeypatch.setattr("llmctl.builder.validation.kernels.check_kernels", lambda *_: None)
    folder, _ = exported((4, 3), dtype="bfloat16", **HEADS)
    edit(folder, "INT8", FP8_TO_INT8)
    wanted = open_test_engine(build_engine(folder), "reference").run(some_tokens(40))
    built = build_engine(folder, backend="cuda", with_binaries=False, **LIMITS)
    engine = open_test_engine(built, "reference")
    assert engine.plan.kv_cache.dtype == "int8"
    assert relative_l2(engine.run(some_tokens(40)), wanted) < 1e-2
    assert engine.kv_cache.abs().max() > 60  # scales are those of the values
    specs = kernel_specs(
        engine.plan, step_limits(engine.plan, read_engine_config(built).build_config)
    )
    cached = [spec.name for spec in specs if "rope" in spec.name or "attention" in spec.name]
    assert cached and all("i8" in name for name in cached), cached


def test_int8_scales_matter(exported, build_engine, open_test_engine, some_tokens) -> None:
    folder, wanted = exported(8)
    edit(folder, "INT8", 20 * FP8_TO_INT8)
    engine = open_test_engine(build_engine(folder), "reference")
    assert relative_l2(engine.run(some_tokens(40)), wanted) > 5e-2


def test_fp8_without_scales_runs_with_ones_where_that_is_asked_for(
    exported, program_name, build_engine, open_test_engine, some_tokens
) -> None:
    folder, _ = exported((4, 3))
    exact = open_test_engine(build_engine(folder, kv_cache_dtype="none"), program_name)
    wanted = exact.run(some_tokens(40))
    edit(folder, None, 1.0)
    options = {"kv_cache_dtype": "fp8", "kv_cache_unit_scales": True}
    engine = open_test_engine(build_engine(folder, **options), program_name)
    assert engine.plan.kv_cache.dtype == "float8_e4m3fn"
    assert not any("k_scale" in op.inputs for op in engine.plan.ops)
    assert 0 < relative_l2(engine.run(some_tokens(40)), wanted) < 0.1


@pytest.mark.parametrize(
    ("algo", "options", "error", "words"),
    [
        ("INT8", {"kv_cache_dtype": "fp8"}, BadConfig, "are for INT8"),
        ("FP8", {"kv_cache_dtype": "int8"}, BadConfig, "are for FP8"),
        (None, {"kv_cache_dtype": "int8"}, MissingTensor, "no KV cache scales"),
        (None, {"kv_cache_dtype": "fp8"}, MissingTensor, "no KV cache scales"),
        (None, {"kv_cache_unit_scales": True}, BadConfig, "is for an FP8 KV cache"),
        ("FP8", {"kv_cache_unit_scales": True}, BadConfig, "has KV scales for FP8"),
        (
            None,
            {"kv_cache_dtype": "int8", "kv_cache_unit_scales": True},
            Unsupported,
            "nearly every key and value would become 0",
        ),
    ],
)
def test_caches_that_would_be_wrong_or_unsupported_are_refused_by_name(
    exported, build_engine, algo, options, error, words
) -> None:
    folder, _ = exported((4, 3))
    edit(folder, algo, 1.0)
    with pytest.raises(error, match=words):
        build_engine(folder, **options)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_int8_is_refused_on_backends_without_kernels_for_it(exported, backend) -> None:
    folder, _ = exported((4, 3))
    edit(folder, "INT8", FP8_TO_INT8)
    with pytest.raises(Unsupported, match=f"no kernels on backend '{backend}'"):
        choose_kv_cache(Checkpoint.open(folder), BuildRequest(), 2, "bfloat16", backend)
