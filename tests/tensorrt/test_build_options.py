"""TensorRT's targets, packages and plugin options: honoured, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tensorrt_rtx
from support.tensorrt.build import plan_engine, write_config
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import TENSORRT_OP
from llmctl.builder.planted import LoadFormat
from llmctl.builder.plugin_config import resolve_plugins
from llmctl.builder.tensorrt.compile import compile_network
from llmctl.builder.tensorrt.networks import build_networks
from llmctl.builder.tensorrt.package import Package, choose_targets, open_package, require
from llmctl.errors import BadConfig, KernelCompileError, MissingPackage, NoDevice, Unsupported
from llmctl.plugins.backends.tensorrt import packages

SMALL = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 64}


# ---- targets ----


def test_targets_are_those_asked_for_or_all_that_serve_the_model() -> None:
    assert choose_targets(None, "tensorrt-rtx", is_fp8=False) == ("8.6", "8.9", "12.0")
    assert choose_targets(None, "tensorrt-rtx", is_fp8=True) == ("8.9", "12.0")
    assert choose_targets("12.0, 8.9", "tensorrt-rtx", is_fp8=True) == ("8.9", "12.0")
    assert choose_targets("SM86,sm_120,8.6", "tensorrt-rtx", is_fp8=False) == ("8.6", "12.0")


@pytest.mark.parametrize(
    ("requested", "is_fp8", "error", "text"),
    [
        ("8.6", True, Unsupported, "before 8.9 have no FP8"),
        ("8.9,8.6", True, Unsupported, r"compute-capability 8\.6"),
        ("9.0", False, Unsupported, "does not support Hopper"),
        ("7.5", False, Unsupported, r"built for 8\.6, 8\.9, 12\.0"),
        ("ada", False, BadConfig, "'ada'"),
        ("", False, BadConfig, "numbers such as 8.9"),
    ],
)
def test_targets_without_kernels_are_refused(requested, is_fp8, error, text) -> None:
    with pytest.raises(error, match=text):
        choose_targets(requested, "tensorrt-rtx", is_fp8)


def test_tensorrt_builds_for_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDevice, match="GPU of this machine") as caught:
        choose_targets(None, "tensorrt", is_fp8=False)
    assert "tensorrt-rtx" in caught.value.fix
    _pretend_gpu(monkeypatch, (9, 0))
    assert choose_targets(None, "tensorrt", is_fp8=True) == ("9.0",)
    assert choose_targets("9.0", "tensorrt", is_fp8=True) == ("9.0",)
    with pytest.raises(Unsupported, match=r"which is 9\.0"):
        choose_targets("8.9", "tensorrt", is_fp8=True)


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)


def test_an_fp8_cache_alone_needs_fp8_hardware(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    with pytest.raises(Unsupported, match="and GPUs before 8.9"):
        plan_engine(checkpoint, **SMALL, compute_capability="8.6")


# ---- packages ----


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_an_absent_package_is_named_with_the_command_that_installs_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(MissingPackage, match=f"backend '{backend}' needs the package") as caught:
        open_package(backend)
    assert f"pip install 'llmctl[{backend}]'" in caught.value.fix


def test_a_folder_of_that_name_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(MissingPackage, match="is not NVIDIA's"):
        open_package("tensorrt")


def test_what_a_version_lacks_is_refused_by_name() -> None:
    old = SimpleNamespace(__name__="tensorrt", __version__="10.13.0")
    with pytest.raises(Unsupported, match=r"--tp-size needs object.add_dist_collective.*10\.13\.0"):
        require(old, object(), "add_dist_collective", "--tp-size")


def test_a_network_that_the_builder_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    engine = plan_engine(write_config(tmp_path, "fp8"), **SMALL)
    found = open_package("tensorrt-rtx")
    networks = build_networks(engine.pieces, engine.limits, engine.config.plugin_config, found.trt)
    with pytest.raises(KernelCompileError, match=r"tensorrt_rtx .* piece first: .*sm86.*fp8"):
        compile_network(found, networks["first"], ("8.6",))


def test_float32_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    with pytest.raises(Unsupported, match="tensorrt-rtx backend computes in bfloat16 or float16"):
        plan_engine(checkpoint, **SMALL, dtype="float32")


def test_planted_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no generator of planted weights"):
        plan_build(
            write_config(tmp_path, "bfloat16"),
            BuildRequest(**SMALL),
            backend="tensorrt-rtx",
            load_format=LoadFormat("planted"),
        )


# ---- plugin options ----


@pytest.mark.parametrize(
    ("cache_type", "name", "value", "text"),
    [
        ("paged", "gpt_attention_plugin", "disable", "reads no paged cache"),
        ("paged", "gemm_plugin", "fp8", "for compute capability 9.0"),
        ("paged", "low_latency_gemm_plugin", "fp8", "for compute capability 9.0"),
        ("paged", "gemm_swiglu_plugin", "fp8", "fused where GEMMs are ours"),
        ("paged", "norm_quant_fusion", "disable", "fuses what it compiles"),
        ("continuous", "gpt_attention_plugin", "bfloat16", "makes one plan"),
        ("continuous", "gemm_plugin", "fp8", "makes one plan"),
        ("continuous", "use_paged_context_fmha", "enable", "not paged"),
        ("continuous", "use_fp8_context_fmha", "enable", "has 16-bit products"),
        ("paged", "use_fp8_context_fmha", "enable", "has 16-bit products"),
        ("paged", "use_fp8_generation_fmha", "enable", "has 16-bit products"),
        ("continuous", "remove_input_padding", "enable", "batches are padded"),
        ("continuous", "multiple_profiles", "disable", "nothing in common"),
    ],
)
def test_what_no_kernel_can_do_is_refused(cache_type, name, value, text) -> None:
    with pytest.raises(Unsupported, match=f"--{name} {value} is refused: .*{text}"):
        resolve_plugins({name: value}, "bfloat16", True, "tensorrt-rtx", cache_type)


def test_a_gemm_given_to_our_kernels_is_another_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that our GEMMs run on; what is left to TensorRT lies between them."""
    _pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(packages, "import_module", lambda name: tensorrt_rtx)
    engine = plan_build(
        write_config(tmp_path, "fp8"),
        BuildRequest(**SMALL),
        backend="tensorrt",
        load_format=LoadFormat("dummy"),
        plugins={"gemm_plugin": "fp8"},
        with_binaries=False,
    )
    ops = [op.op for op in engine.plan.ops]
    ours = {"packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv", "paged_attention"}
    assert set(ops) == {TENSORRT_OP, *ours}
    assert not [n for piece in engine.pieces for n in piece.nodes if "linear" in n.op]
    assert [op.attributes["piece"] for op in engine.plan.ops if op.op == TENSORRT_OP][0] == "first"
    found = Package("tensorrt", tensorrt_rtx)
    networks = build_networks(engine.pieces, engine.limits, engine.config.plugin_config, found.trt)
    for network in networks.values():
        assert compile_network(found, network, ("8.9",)).plan
