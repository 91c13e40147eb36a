"""`llmctl doctor` says which backends work here, why the others do not, and exits accordingly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmctl.cli.doctor import backends
from llmctl.cli.doctor.backends import Backend, Check, check_backends
from llmctl.errors import NoDevice

H200 = ("NVIDIA H200", "9.0", 132)
RTX = ("NVIDIA GeForce RTX 4090", "8.9", 128)
MIG = ("NVIDIA H200 MIG 1g.18gb", "9.0", 16)
A100 = ("NVIDIA A100-SXM4-80GB", "8.0", 108)


def _gpu(name: str, capability: str, multiprocessors: int) -> dict[str, Any]:
    return {
        "name": name,
        "compute_capability": capability,
        "multiprocessors": multiprocessors,
        "memory_bytes": 1,
        "memory_free_bytes": 1,
    }


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch):
    """The answers by backend, where every package is installed."""
    monkeypatch.setattr(backends, "_package", lambda backend: f"{backend} 11.0")
    monkeypatch.setattr(backends, "_compile_for_gpu", lambda: "compilers")

    def check(*gpus: tuple[str, str, int]) -> dict[str, Backend]:
        return {b.name: b for b in check_backends([_gpu(*gpu) for gpu in gpus], "13.0")}

    return check


@pytest.mark.parametrize(
    "gpu, running",
    [
        (H200, {"cuda", "tensorrt", "cpu"}),
        (RTX, {"tensorrt", "tensorrt-rtx", "cpu"}),
        (MIG, {"tensorrt", "cpu"}),
        (A100, {"tensorrt", "cpu"}),
        (None, {"cpu"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_gpu_runs_what_there_are_kernels_for(checked, gpu, running):
    found = checked(*([gpu] if gpu else []))
    assert {name for name, backend in found.items() if backend.run.ok} == running
    for backend in found.values():
        for check in (backend.build, backend.run):
            assert check.detail and (check.ok or check.fix)


def test_reasons_name_what_was_found_and_what_would_do(checked):
    hopper, ada = checked(H200), checked(RTX)
    assert "does not run on NVIDIA H200" in hopper["tensorrt-rtx"].run.detail
    assert hopper["tensorrt-rtx"].run.fix == "--backend cuda"
    assert "8.9" in ada["cuda"].run.detail and ada["cuda"].run.fix == "--backend tensorrt-rtx"
    assert "16 multiprocessors" in checked(MIG)["cuda"].run.detail


def test_engines_for_absent_gpus_can_be_built_but_not_by_tensorrt(checked):
    found = checked()
    assert found["cuda"].build.ok and found["tensorrt-rtx"].build.ok
    assert not found["tensorrt"].build.ok


def test_an_assembler_that_triton_cannot_run_is_the_reason(monkeypatch, tmp_path):
    broken = tmp_path / "ptxas"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo release 13.0 || exit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    check = backends._try(backends._compile_for_gpu)
    assert not check.ok and "gather" in check.detail and "ptxas" in check.detail


def test_a_missing_compiler_or_package_is_the_reason(monkeypatch):
    def missing(*_: object) -> str:
        raise NoDevice("it was not found", fix="install it")

    monkeypatch.setattr("llmctl.plugins.backends.cuda.nvrtc.compile_source", missing)
    monkeypatch.setattr("llmctl.builder.tensorrt.package.open_package", missing)
    found = {b.name: b for b in check_backends([_gpu(*H200)], "13.0")}
    wanted = Check(False, "it was not found", "install it")
    assert found["cuda"].build == wanted
    assert found["tensorrt"].build == found["tensorrt"].run == wanted
    assert found["tensorrt-rtx"].build == found["tensorrt-rtx"].run == wanted
    assert found["cuda"].run.ok  # an engine built elsewhere runs


@pytest.mark.parametrize(
    "driver, torch_cuda, words",
    [
        (None, "13.0", "no NVIDIA driver"),
        ("12.4", "13.0", "built for CUDA 13.0 and finds no device"),
        ("13.0", None, "built without CUDA"),
    ],
)
def test_without_a_device_the_reason_is_driver_or_torch(monkeypatch, driver, torch_cuda, words):
    monkeypatch.setattr("torch.version.cuda", torch_cuda)
    found = {b.name: b for b in check_backends([], driver)}
    assert words in found["cuda"].run.detail and found["cuda"].run.fix


def test_the_json_object_holds_machine_libraries_and_backends(llmctl):
    done = llmctl("doctor", "--json")
    found = json.loads(done.out)
    assert set(found) == {"machine", "driver", "gpus", "libraries", "backends", "quantize"}
    assert found["libraries"]["torch"] and found["machine"]["memory_bytes"] > 1 << 28
    names = [backend["name"] for backend in found["backends"]]
    assert names == ["cuda", "tensorrt", "tensorrt-rtx", "cpu"]


@pytest.mark.parametrize("is_working", [True, False])
def test_the_exit_code_says_whether_the_backend_works(llmctl, monkeypatch, is_working):
    yes, no = Check(True, "found"), Check(False, "absent", "install it")
    run = yes if is_working else no
    made = [Backend("cuda", yes, no), Backend("tensorrt", no, no)]
    made += [Backend("tensorrt-rtx", yes, no), Backend("cpu", yes, run)]
    monkeypatch.setattr(backends, "check_backends", lambda *_: made)
    assert llmctl("doctor").code == llmctl("doctor", "--backend", "cpu").code
    assert llmctl("doctor").code == (0 if is_working else 3)
    assert llmctl("doctor", "--backend", "cuda").code == 3
    lines = [" ".join(line.split()) for line in llmctl("doctor").out.splitlines()]
    assert "cuda build yes found" in lines and "run no absent" in lines
    assert "tensorrt build, run no absent" in lines and "fix: install it" in lines
