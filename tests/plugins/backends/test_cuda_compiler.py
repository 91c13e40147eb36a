"""Compiling kernels without a GPU: what comes out, what is refused, what is cached."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda_samples.specs import ADD_ROWS, COPY_BOX, NORM, PRODUCT
from support.kernel import disassemble

from llmctl.errors import KernelCompileError, MissingPackage, Unsupported
from llmctl.plugins.backends.cuda import compiler, nvrtc
from llmctl.plugins.backends.cuda.compiler import (
    CompiledKernel,
    compile_kernel,
    runs_on,
    uses_pdl,
)
from llmctl.plugins.backends.cuda.cubin import read_cubin
from llmctl.plugins.backends.cuda.sources import triton_compiler


@pytest.fixture(autouse=True)
def samples(repository, monkeypatch, tmp_path):
    """The sample sources take the place of the kernels, and nothing is cached yet."""
    monkeypatch.setattr(compiler, "PLUGINS", repository / "tests")
    monkeypatch.setattr(compiler, "_memo", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_triton_kernel_becomes_a_cubin_with_what_a_launch_needs():
    kernel = compile_kernel(NORM)
    assert (kernel.name, kernel.entry, kernel.threads) == ("sample.norm", "scaled_norm", 128)
    assert kernel.num_hidden_arguments == compiler.TRITON_HIDDEN_ARGUMENTS
    assert kernel.local_bytes == 0 and 8 <= kernel.registers <= 255
    sizes = read_cubin(kernel.cubin, kernel.entry).parameters
    assert sizes == (8, 8, 8, 4, 4, 8, 8)


def test_programmatic_launch_instructions_are_there_exactly_when_asked_for():
    with_pdl = disassemble(compile_kernel(NORM))
    without = disassemble(compile_kernel(replace(NORM, constants={"WIDTH": 256, "PDL": False})))
    assert "ACQBULK" in with_pdl and "PREEXIT" in with_pdl
    assert "ACQBULK" not in without and "PREEXIT" not in without


def test_an_fp8_product_with_16_columns_uses_the_fp8_matrix_unit():
    sass = disassemble(compile_kernel(PRODUCT))
    assert "QGMMA.64x16x32.F32.E4M3.E4M3" in sass


def test_a_cuda_kernel_becomes_a_cubin_with_what_a_launch_needs():
    kernel = compile_kernel(ADD_ROWS)
    assert (kernel.entry, kernel.threads, kernel.shared_bytes) == ("add_rows", 128, 1024)
    assert kernel.num_hidden_arguments == 0 and kernel.local_bytes == 0
    assert "FMUL" in disassemble(kernel)


def test_tensor_maps_are_parameters_of_128_bytes_that_tma_reads():
    kernel = compile_kernel(COPY_BOX)
    assert read_cubin(kernel.cubin, "copy_box").parameters == (128, 8, 4)
    assert "UTMALDG.2D" in disassemble(kernel)


def test_spilled_bytes_are_those_of_the_kernel_alone():
    spilling = replace(ADD_ROWS, entry="spilling", arguments=("*i32", "i32"))
    assert compile_kernel(spilling).local_bytes == 256  # its array of 64 int
    assert compile_kernel(ADD_ROWS).local_bytes == 0  # of the same file
    assert "STL" in disassemble(compile_kernel(spilling))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(ADD_ROWS, arguments=("*fp32",)), r"parameters of \[8, 8, 4, 8, 4\] bytes"),
        (replace(ADD_ROWS, entry="absent"), "no kernel 'absent'"),
        (replace(ADD_ROWS, constants={}), r'(?s)sample.cu does not compile:.*"WIDTH" is undefined'),
        (replace(ADD_ROWS, num_warps=8), "bounded to 128 threads"),
        (replace(NORM, arguments=("*bf16",)), "run-time arguments"),
        (replace(NORM, constants={**NORM.constants, "EXTRA": 1}), "EXTRA"),
        (replace(NORM, cluster=2), "no clusters"),
        (replace(PRODUCT, constants={"M": 64, "N": 16, "K": 100}), "does not compile"),
    ],
)
def test_a_spec_that_its_source_does_not_fit_is_refused(spec, message):
    with pytest.raises(KernelCompileError, match=message):
        compile_kernel(spec)


def test_another_compute_capability_is_refused():
    with pytest.raises(Unsupported, match="capability 8.0"):
        compile_kernel(NORM, "8.0")


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_triton_kernels_are_compiled_for_other_gpus_without_dependent_launch(capability):
    assert not uses_pdl(capability) and uses_pdl("9.0")
    kernel = compile_kernel(NORM, capability)
    assert kernel.cubin != compile_kernel(NORM).cubin
    assert "ACQBULK" in disassemble(compile_kernel(NORM))  # waits for its predecessor
    assert "ACQBULK" not in disassemble(kernel, capability)


@pytest.mark.parametrize(("spec", "capability"), [(NORM, "8.6"), (ADD_ROWS, "8.9")])
def test_fp8_before_ada_and_cuda_cpp_beside_hopper_are_refused(spec, capability):
    assert not runs_on(spec, capability) and runs_on(spec, "9.0")
    with pytest.raises(Unsupported, match=f"{spec.name} cannot be compiled for .* {capability}"):
        compile_kernel(spec, capability)


@pytest.mark.parametrize("spec", [NORM, ADD_ROWS], ids=["triton", "cuda"])
def test_compiling_twice_gives_the_same_bytes(spec, tmp_path, monkeypatch):
    first = compile_kernel(spec)
    monkeypatch.setattr(compiler, "_memo", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert compile_kernel(spec) == first
    assert str(compiler.PLUGINS).encode() not in first.cubin, "it says where it was compiled"


def test_threads_may_compile_beside_each_other(monkeypatch):
    triton = triton_compiler()
    compile_one = triton.compile

    def slowly(*arguments: object, **options: object) -> object:
        folder = triton.knobs.cache.dir
        time.sleep(0.05)  # for the others to begin, if they may
        built = compile_one(*arguments, **options)
        assert triton.knobs.cache.dir == folder and Path(folder).is_dir()
        return built

    monkeypatch.setattr(triton, "compile", slowly)
    specs = [replace(NORM, constants={"WIDTH": 64 << n, "PDL": True}) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(compile_kernel, specs))
    monkeypatch.setattr(triton, "compile", compile_one)
    assert beside == [compiler.compile_anew(spec) for spec in specs]


def test_metadata_survives_json():
    kernel = compile_kernel(ADD_ROWS)
    stored = json.loads(json.dumps(kernel.metadata()))
    assert CompiledKernel.from_metadata(stored, kernel.cubin) == kernel


def cached() -> list[Path]:
    return sorted(compiler.cache_folder().iterdir())


def forbid_compiling(monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_memo", {})
    monkeypatch.setattr(nvrtc, "compile_source", fail)


def test_a_cached_kernel_is_not_compiled_again(monkeypatch):
    first = compile_kernel(ADD_ROWS)
    forbid_compiling(monkeypatch)
    assert compile_kernel(ADD_ROWS) == first
    with pytest.raises(AssertionError, match="compiled again"):
        compile_kernel(replace(ADD_ROWS, constants={"WIDTH": 128}))


def test_kernels_of_different_names_and_arguments_share_what_is_compiled(monkeypatch):
    first = compile_kernel(ADD_ROWS)
    forbid_compiling(monkeypatch)
    other = replace(ADD_ROWS, name="sample.other", arguments=("*bf16", *ADD_ROWS.arguments[1:]))
    assert compile_kernel(other) == replace(first, name=other.name, arguments=other.arguments)
    with pytest.raises(KernelCompileError, match="has parameters of"):
        compile_kernel(replace(ADD_ROWS, arguments=ADD_ROWS.arguments[:-1]))


def test_a_damaged_cache_entry_is_compiled_again(monkeypatch):
    first = compile_kernel(ADD_ROWS)
    (entry,) = cached()
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(compiler, "_memo", {})
    assert compile_kernel(ADD_ROWS) == first


def test_a_changed_include_is_compiled_again(tmp_path, repository, monkeypatch):
    folder = tmp_path / "support" / "cuda_samples"
    folder.mkdir(parents=True)
    for name in ("sample.cu", "sample.cuh"):
        (folder / name).write_text(
            (repository / "tests" / "support" / "cuda_samples" / name).read_text()
        )
    monkeypatch.setattr(compiler, "PLUGINS", tmp_path)
    compile_kernel(ADD_ROWS)
    with (folder / "sample.cuh").open("a") as file:
        file.write("// another line\n")
    compile_kernel(ADD_ROWS)
    assert len(cached()) == 2


def test_a_cache_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_kernel(ADD_ROWS).entry == "add_rows"


@pytest.mark.parametrize("has_name", [True, False], ids=["no folder", "no name"])
def test_kernels_compile_where_nobody_has_a_home(tmp_path, monkeypatch, has_name):
    def home():
        if has_name:
            return Path("/proc/nope")
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("HOME", "/proc/nope")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert compile_kernel(NORM).entry == "scaled_norm"  # Triton's
    assert compile_kernel(ADD_ROWS).entry == "add_rows"
    assert not compiler.cache_folder().exists()


def test_a_missing_compiler_is_named_with_its_fix(monkeypatch):
    monkeypatch.setattr(nvrtc, "_in_wheels", lambda: [])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", fail_to_load)
    nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(MissingPackage, match="NVRTC") as failure:
            nvrtc.nvrtc()
    finally:
        nvrtc.nvrtc.cache_clear()
    assert "pip install" in failure.value.fix


def fail_to_load(path: str) -> None:
    raise OSError(path)


def test_a_file_that_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        read_cubin(b"not a cubin at all", "entry")
