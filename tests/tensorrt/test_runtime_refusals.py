"""TensorRT engines are refused where they cannot run: by name, before a plan or a weight is read,
with the GPU, the package and what else would do."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from support.config import PRETRAINED
from support.tensorrt.checkpoints import write_checkpoint
from support.tensorrt.fake_engines import write_fake_engine
from support.tensorrt.fake_machine import pretend, pretend_gpu
from support.tensorrt.fake_tensorrt import FakeModule

from llmctl.builder.engine_format import CONFIG_FILE, SCHEMA_VERSION, EngineConfig, engine_file
from llmctl.errors import CorruptEngine, MissingPackage, NoDevice, RebuildNeeded, Unsupported
from llmctl.runtime.engines.open_cuda import plan_engines
from llmctl.runtime.engines.tensorrt_check import require_tensorrt
from llmctl.runtime.open import EngineOptions, check_engines

BUILD = {
    "max_batch_size": 2,
    "max_seq_len": 64,
    "max_num_tokens": 64,
    "max_draft_len": 0,
    "tokens_per_block": 32,
    "tp_size": 1,
    "kv_cache_type": "PAGED",
    "kv_cache_dtype": "bfloat16",
    "speculative_decoding_mode": 1,
}


def config_of(backend: str = "tensorrt-rtx", capability: str = "8.9", **build: object):
    return EngineConfig(
        version=SCHEMA_VERSION,
        backend=backend,
        pretrained_config=PRETRAINED,
        build_config={**BUILD, **build},
        plugin_config={},
        source={},
        tokenizer={"hash": None, "vocab_size": None},
        versions={},
        command="",
        files={engine_file(0): {"bytes": 1, "header_sha256": ""}},
        compute_capability=capability,
    )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Both packages as if they were installed."""
    module = ModuleType("tensorrt_rtx")
    vars(module)["Runtime"] = object
    for name in ("tensorrt_rtx", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, module)
    return module


def test_an_engine_runs_on_the_gpu_and_package_it_was_built_for(monkeypatch, package) -> None:
    pretend_gpu(monkeypatch, (12, 0))
    assert require_tensorrt(config_of(capability="8.9,12.0")) is package
    pretend_gpu(monkeypatch, (9, 0), "NVIDIA H200")
    assert require_tensorrt(config_of("tensorrt", "9.0")) is package


def test_hopper_is_refused_by_rtx_with_the_backends_that_serve_it(monkeypatch, package) -> None:
    pretend_gpu(monkeypatch, (9, 0), "NVIDIA H200")
    with pytest.raises(RebuildNeeded) as found:
        require_tensorrt(config_of())
    assert str(found.value) == (
        "the engine was built for backend 'tensorrt-rtx' (package tensorrt_rtx, compute capability "
        "8.9); TensorRT-RTX does not run on NVIDIA H200 (compute capability 9.0): it serves RTX "
        "GPUs of 8.6, 8.9, 12.0"
    )
    for backend in ("--backend cuda", "--backend tensorrt", "--backend cpu"):
        assert backend in found.value.fix


@pytest.mark.parametrize(
    "backend, built, found, message, fix",
    [
        (
            "tensorrt-rtx",
            "8.9,12.0",
            (8, 6),
            "8.9 or 12.0.; .* has 8.6",
            "--compute-capability 8.6",
        ),
        ("tensorrt-rtx", "8.9", (8, 0), "does not run on", "--backend cpu"),
        ("tensorrt", "9.0", (8, 9), "package tensorrt, .* has 8.9", "--backend tensorrt-rtx"),
        ("tensorrt", "10.0", (9, 0), "has 9.0", "--backend cuda"),
    ],
)
def test_other_gpus_are_refused_with_what_would_do(
    backend, built, found, message, fix, monkeypatch, package
) -> None:
    pretend_gpu(monkeypatch, found)
    with pytest.raises(RebuildNeeded, match=message) as refused:
        require_tensorrt(config_of(backend, built))
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    "version, message", [(None, "is built without CUDA"), ("13.0", "finds no")]
)
def test_a_machine_without_a_gpu_is_refused(version, message, monkeypatch) -> None:
    pretend_gpu(monkeypatch, None)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(NoDevice, match=f"package tensorrt_rtx, .*{message}") as found:
        require_tensorrt(config_of())
    assert "an RTX GPU" in found.value.fix


@pytest.mark.parametrize(
    "backend, command",
    [
        ("tensorrt-rtx", "pip install 'llmctl[tensorrt-rtx]'"),
        ("tensorrt", "pip install 'llmctl[tensorrt]' --extra-index-url https://pypi.nvidia.com"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    backend, command, monkeypatch
) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    name = backend.replace("-", "_")
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(MissingPackage, match=f"{name}, which cannot be imported") as e:
        require_tensorrt(config_of(backend))
    assert e.value.fix == command


def test_a_folder_of_the_packages_name_is_not_taken_for_it(monkeypatch) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(MissingPackage, match="is not NVIDIA's"):
        require_tensorrt(config_of("tensorrt"))


def test_engines_of_several_ranks_are_refused(monkeypatch, package) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    with pytest.raises(Unsupported, match="has 2 ranks"):
        require_tensorrt(config_of(tp_size=2))


def test_the_refusal_comes_before_the_engine_file_is_opened(monkeypatch, tmp_path) -> None:
    """config.json alone is there: reading more would be CorruptEngine or EngineNotFound."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(replace(config_of(), command="llmctl build").to_json())
    pretend_gpu(monkeypatch, (9, 0), "NVIDIA H100")
    with pytest.raises(RebuildNeeded, match="NVIDIA H100"):
        check_engines(EngineOptions(folder))


def test_plans_are_refused_before_weights_are_read(monkeypatch, tmp_path) -> None:
    module = FakeModule(pytest.importorskip("tensorrt_rtx"))
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    folder = write_fake_engine(checkpoint, tmp_path / "e", module)
    pretend(monkeypatch, module)
    module.faults.add("deserialize")

    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("llmctl.runtime.engines.engine_file.Loading", read)
    planned = plan_engines({"target": folder})
    with pytest.raises(CorruptEngine, match="cannot open the plan first"):
        planned.load()
