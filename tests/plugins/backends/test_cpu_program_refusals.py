"""What the CPU backend refuses; threads, forks and the compiled library."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from support.cpu_program import (
    TinyModel,
    chunk_step,
)

from llmctl.errors import BadConfig, CorruptEngine, NoDevice, Unsupported
from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cpu import binding as binding_module
from llmctl.plugins.backends.cpu import compile as compile_module
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.core.operators import SPECS


def test_a_head_size_the_kernels_cannot_hold_is_refused_at_load():
    case = {**SPECS["paged_attention"].cases[0], "head_size": 514}
    with pytest.raises(Unsupported, match="head_size 514"):
        cpu.CpuProgram([make_example("paged_attention", case).call])


def test_a_call_that_breaks_its_spec_is_refused_at_load():
    call = make_example("linear", SPECS["linear"].cases[0]).call
    wrong = OpCall("linear", "l", {**call.inputs, "weight": torch.zeros(3, 3)}, call.outputs, {})
    with pytest.raises(CorruptEngine, match="'l'"):
        cpu.CpuProgram([wrong])


def changed(op, case=None, attributes=None, **tensors):
    """An example's call with other attributes or tensors."""
    call = make_example(op, case or SPECS[op].cases[0]).call
    inputs = {**call.inputs, **{k: v for k, v in tensors.items() if k not in call.outputs}}
    outputs = {k: tensors.get(k, v) for k, v in call.outputs.items()}
    return OpCall(op, "it", inputs, outputs, {**call.attributes, **(attributes or {})})


@pytest.mark.parametrize("op", ["rope_kv_write", "paged_attention"])
def test_a_layer_below_zero_is_refused_at_load(op):
    with pytest.raises(CorruptEngine, match="layer is -1"):
        cpu.CpuProgram([changed(op, attributes={"layer": -1})])


def test_heads_that_do_not_divide_are_refused_at_load():
    case = {**SPECS["paged_attention"].cases[0], "num_heads": 3, "num_kv_heads": 2}
    with pytest.raises(CorruptEngine, match="3 heads over 2"):
        cpu.CpuProgram([make_example("paged_attention", case).call])


def test_a_scale_for_some_tokens_alone_is_refused_at_load():
    case = next(c for c in SPECS["linear"].cases if c["x_dtype"] == FP8 and c["tokens"] == 5)
    with pytest.raises(CorruptEngine, match="x_scale has shape .2,., but S is 1 or 5"):
        cpu.CpuProgram([changed("linear", case, x_scale=torch.ones(2))])


def test_eight_bits_without_a_scale_are_refused_at_load():
    out = torch.zeros(1, 16).to(torch.float8_e4m3fn)
    with pytest.raises(CorruptEngine, match="out is float8_e4m3fn with 0 of the scales"):
        cpu.CpuProgram([changed("rms_norm", out=out)])


@pytest.mark.parametrize("op", ["rms_norm", "quantize"])
def test_rows_wider_than_a_threads_scratch_are_refused_at_load(op):
    case = {**SPECS[op].cases[0], "hidden": 300_000, "tokens": 1}
    with pytest.raises(Unsupported, match="rows of 300000 elements"):
        cpu.CpuProgram([make_example(op, case).call])


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_thread_is_refused(count):
    with pytest.raises(BadConfig, match=f"is {count}"):
        cpu.set_num_threads(count)


def test_programs_of_two_python_threads_do_not_disturb_each_other(prompts):
    cpu.set_num_threads(2)
    models = [TinyModel(quantized) for quantized in (False, True)]
    step = chunk_step(prompts, [(2, 0, 70), (1, 0, 17)])
    for model in models:
        cpu.CpuProgram(model.calls).run(step, model.kv_cache)
    wanted = [model.logits.clone() for model in models]
    failures = []

    def work(model: TinyModel, logits: torch.Tensor) -> None:
        program = cpu.CpuProgram(model.calls)
        for _ in range(50):
            model.logits.zero_()
            program.run(step, model.kv_cache)
            if not torch.equal(model.logits, logits):
                failures.append(model)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(models, wanted, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_computes_with_threads_of_its_own():
    script = """
        import os, numpy as np
        from llmctl.plugins.backends import cpu
        cpu.set_num_threads(3)
        rows = np.random.default_rng(0).standard_normal((64, 5000)).astype(np.float32)
        assert (cpu.CpuSampling().argmax(rows) == rows.argmax(1)).all()
        child = os.fork()
        correct = (cpu.CpuSampling().argmax(rows) == rows.argmax(1)).all()
        if child == 0:
            os._exit(0 if correct and cpu.num_threads() == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0 and correct
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture
def reloaded():
    """Forget the loaded library before and after the test."""
    binding_module.load_kernels.cache_clear()
    yield
    binding_module.load_kernels.cache_clear()


def test_an_absent_library_is_named_with_its_fix(reloaded, monkeypatch, tmp_path):
    monkeypatch.setattr(binding_module, "LIBRARY_PATH", tmp_path / "absent.so")
    with pytest.raises(NoDevice, match="absent.so") as failure:
        binding_module.load_kernels()
    assert "llmctl.plugins.backends.cpu.compile" in failure.value.fix


def test_a_library_compiled_from_other_sources_is_refused(reloaded, monkeypatch):
    monkeypatch.setattr(compile_module, "source_hash", lambda: "0000")
    with pytest.raises(NoDevice, match="compiled from other sources"):
        binding_module.load_kernels()


def test_a_library_of_an_earlier_version_is_refused_before_its_functions_are_looked_up(
    reloaded, monkeypatch, tmp_path
):
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" int llmctl_abi_version(void) { return 1; }')
    compiler = compile_module.find_compiler()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(binding_module, "LIBRARY_PATH", library)
    with pytest.raises(NoDevice, match="ABI version 1, wanted"):
        binding_module.load_kernels()


def test_an_installed_library_without_its_sources_names_them(reloaded, monkeypatch, tmp_path):
    """Ranks compare it."""
    library = shutil.copy(binding_module.LIBRARY_PATH, tmp_path)
    monkeypatch.setattr(binding_module, "LIBRARY_PATH", Path(library))
    assert (
        binding_module.load_kernels().llmctl_source_hash().decode() == compile_module.source_hash()
    )


def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler .* apt-get install g\\+\\+"):
        compile_module.compile_library(tmp_path / "out.so")


def test_a_compiler_that_fails_leaves_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SystemExit, match="compiling the CPU kernels failed"):
        compile_module.compile_library(tmp_path / "out.so")
    assert not list(tmp_path.iterdir())
