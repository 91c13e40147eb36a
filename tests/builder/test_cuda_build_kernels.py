"""Kernels of cuda engines, generated weights, and what cannot be built."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.attention_compiled import HERE, of_chains
from support.attention_models import world_of
from support.cuda_build import CASES, COMPILED_HERE, LIMITS
from support.stand_ins import one_of_each_kind

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.engine_kernels import kernel_specs
from llmctl.builder.planted import LoadFormat
from llmctl.builder.step_limits import step_limits
from llmctl.cli.main import execute
from llmctl.errors import BadConfig, CheckpointNotFound, UnknownQuantization, Unsupported
from llmctl.plugins.backends.cuda import nvrtc
from llmctl.plugins.backends.cuda.compiler import CompiledKernel, is_needed
from llmctl.plugins.backends.cuda.cubin import read_cubin


@pytest.fixture(scope="module")
def fp8_engine(cuda_engines: Callable[[str], Path]) -> Path:
    """The FP8 engine with the most features: biases, static scales, FP8 KV cache."""
    return cuda_engines("qwen2 fp8")


def test_kernels_are_stored_and_read_back_whole(checkpoints, tmp_path) -> None:
    with one_of_each_kind() as compile_kernel:
        planned = plan_build(checkpoints(COMPILED_HERE), BuildRequest(**LIMITS), backend="cuda")
        run_build(planned, tmp_path / "engine")
    plan, tensors = open_engine(tmp_path / "engine")
    config = read_engine_config(tmp_path / "engine")
    specs = {
        spec.name: spec
        for spec in kernel_specs(plan, step_limits(plan, config.build_config))
        if is_needed(spec, "9.0")
    }
    assert [kernel.name for kernel in plan.kernels] == sorted(specs)
    for kernel in plan.kernels:
        cubin = tensors[kernel.tensor].numpy().tobytes()
        assert len(cubin) == kernel.num_bytes
        assert CompiledKernel.from_metadata(kernel.metadata, cubin) == compile_kernel(
            specs[kernel.name]
        )
        assert read_cubin(cubin, kernel.metadata["entry"]).registers == kernel.metadata["registers"]
    assert config.compute_capability == "9.0" and config.backend == "cuda"
    assert config.versions["nvrtc"] == nvrtc.version()
    assert config.versions["triton"] == version("triton")
    assert plan.scratch_bytes > 0


def test_attention_is_that_of_a_model_whose_kernels_are_compiled_anyway(fp8_engine) -> None:
    """Engines that tests build compile nothing that the tests of attention do not."""
    plan, _ = open_engine(fp8_engine)
    names = {k.name for k in plan.kernels if k.name.startswith("paged_attention.")}
    chains = {name for name in names if not name.endswith((".trees", ".tree"))}
    worlds = [world_of(*each) for each in HERE]
    assert chains and chains <= {spec.name for world in worlds for spec in of_chains(world)}


@pytest.mark.usefixtures("stand_ins")
def test_layers_share_kernels(checkpoints) -> None:
    """A model of 80 layers has the kernels of one of 3: the last, the first and another."""
    config = json.loads((checkpoints("llama") / "config.json").read_text())
    names = []
    for count in (3, 12):
        folder = checkpoints("llama").parent / f"{count}"
        folder.mkdir(exist_ok=True)
        text = json.dumps({**config, "num_hidden_layers": count})
        (folder / "config.json").write_text(text)
        engine = plan_build(
            folder, BuildRequest(**LIMITS), backend="cuda", load_format=LoadFormat("dummy")
        )
        names.append([kernel.name for kernel in engine.plan.kernels])
    assert names[0] == names[1]


@pytest.mark.usefixtures("stand_ins")
def test_progress_is_told_for_every_kernel(checkpoints) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = plan_build(
        checkpoints("llama"),
        BuildRequest(**LIMITS),
        backend="cuda",
        on_kernel=lambda *step: seen.append(step),
    )
    count = len(engine.plan.kernels)
    assert [(index, total) for _, index, total in seen] == [(i, count) for i in range(count)]


def test_inspect_shows_kernels_and_tactics(fp8_engine, capsys) -> None:
    assert execute(["inspect", str(fp8_engine), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    plan, _ = open_engine(fp8_engine)
    shown = {kernel["name"]: kernel for kernel in described["kernels"]}
    assert set(shown) == {kernel.name for kernel in plan.kernels}
    for kernel in plan.kernels:
        for name in ("registers", "shared_bytes", "threads"):
            assert shown[kernel.name][name] == kernel.metadata[name]
    tactics = {op["tactic"] for group in described["layers"] for op in group["ops"]}
    assert tactics == {op.tactic for op in plan.ops}
    assert described["memory"]["scratch_bytes"] == plan.scratch_bytes


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("case", ["llama", "qwen2 fp8", "llama fp8 rows, tokens"])
def test_a_generated_engine_has_the_plan_of_a_stored_one(case, checkpoints, cuda_engines, tmp_path):
    source = checkpoints(case)
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).is_file():
            (tmp_path / name).write_bytes((source / name).read_bytes())
    generated = LoadFormat("dummy", seed=3)
    request = BuildRequest(**LIMITS)
    engine = plan_build(tmp_path, request, backend="cuda", load_format=generated)
    run_build(engine, tmp_path / "engine")
    plan, tensors = open_engine(tmp_path / "engine")
    wanted, stored = open_engine(cuda_engines(case))
    assert plan.ops == wanted.ops and plan.kernels == wanted.kernels
    assert [(t.name, t.dtype, t.shape) for t in plan.tensors] == [
        (t.name, t.dtype, t.shape) for t in wanted.tensors
    ]
    kept = {kernel.tensor for kernel in plan.kernels}
    assert set(tensors) == kept and kept < set(stored)
    assert plan.rotary == wanted.rotary and set(plan.rotary) == {"rotary"}
    weights = read_engine_config(tmp_path / "engine").weights
    assert weights == {"load_format": "dummy", "seed": 3}


@pytest.mark.usefixtures("stand_ins")
def test_planted_weights_name_the_tokens_they_speak_of(checkpoints) -> None:
    load_format = LoadFormat("planted", seed=5, role="draft", acceptance=0.5)
    engine = plan_build(
        checkpoints("llama"), BuildRequest(**LIMITS), backend="cuda", load_format=load_format
    )
    assert engine.config.weights == {
        "load_format": "planted",
        "seed": 5,
        "role": "draft",
        "acceptance": 0.5,
        "ordinary_tokens": [3, 131],  # bos is 1 and eos is 2
    }
    with pytest.raises(Unsupported, match="tied to the embedding"):
        plan_build(
            checkpoints("llama tied, biases"),
            BuildRequest(**LIMITS),
            backend="cuda",
            load_format=load_format,
        )


@pytest.mark.usefixtures("stand_ins")
def test_a_float32_model_is_refused_with_what_to_do(new_model, save) -> None:
    folder = save(new_model("llama", **CASES["llama"][1]))
    with pytest.raises(Unsupported, match="the model's dtype is float32") as caught:
        plan_build(folder, BuildRequest(**LIMITS), backend="cuda")
    assert caught.value.fix == "--dtype bfloat16"
    request = BuildRequest(**LIMITS, dtype="bfloat16")
    assert plan_build(folder, request, backend="cuda").config.backend == "cuda"


def test_weight_only_fp8_is_refused(checkpoints, tmp_path) -> None:
    source = checkpoints("llama fp8")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownQuantization, match="None activations"):
        plan_build(tmp_path, BuildRequest(**LIMITS), backend="cuda")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "cuda", "--compute-capability", "8.9"], "--compute-capability 8.9"),
        (["--backend", "cuda", "--compute-capability", "10.0"], "--compute-capability 10.0"),
        (["--backend", "cpu", "--compute-capability", "9.0"], "no effect on cpu engines"),
        (["--backend", "cuda", "--dtype", "float32"], "the model's dtype is float32"),
        (["--backend", "opencl"], "backend is opencl; it must be one of"),
        (["--seed", "3"], "--seed is for --load-format dummy and planted"),
        (["--load-format", "planted", "--planted-acceptance", "1.5"], "--planted-acceptance is"),
        (
            ["--load-format", "planted", "--planted-head-qformat", "fp8"],
            "is for draft heads, and mode none has none",
        ),
        (["--load-format", "random"], "--load-format is random"),
        (["--backend", "cpu", "--load-format", "dummy"], "weights are generated on a GPU"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    arguments, text, checkpoints, tmp_path, capsys
) -> None:
    base = ["build", "--checkpoint-dir", str(checkpoints("llama"))]
    assert execute([*base, "--output-dir", str(tmp_path / "engine"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("field", ["seed", "acceptance"])
@pytest.mark.parametrize("value", ["a", [1], {}, True, None])
def test_odd_recipes_of_planted_weights_are_refused(field, value) -> None:
    with pytest.raises(BadConfig, match=field):
        LoadFormat("planted", **{field: value})


def test_a_folder_without_config_generates_nothing(tmp_path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json does not exist"):
        plan_build(tmp_path, BuildRequest(), backend="cuda", load_format=LoadFormat("dummy"))
