"""Whole programs on the CPU backend: agreement with the references, exactness across schedules,
and the named failures of the library and of a bad step."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from llmctl.errors import BadConfig, CorruptEngine, NoDevice, Unsupported
from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cpu import binding as binding_module
from llmctl.plugins.backends.cpu import compile as compile_module
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.example_parts import make_step, random_tensor
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.core.operators import SPECS
from llmctl.plugins.core.reference import ReferenceProgram

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, SIZE, TOKENS = 131, 48, 80, 3, 1, 16, 96
SHAPE = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}


class TinyModel:
    """Two Llama layers with random weights, as calls into buffers that are reused in turn."""

    def __init__(self, quantized: bool) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.quantized = quantized
        self.activation = FP8 if quantized else "bfloat16"
        self.calls: list[OpCall] = []
        residual = self.add("embedding", {"weight": self.random(VOCAB, HIDDEN)}, HIDDEN)
        x = residual
        for layer in range(2):
            x = self.norm(x, residual if layer else None)
            x = self.attention(layer, x)
            x = self.norm(x, residual)
            scales = {"scale": torch.tensor([0.01])} if quantized else {}
            up = self.linear(x, 2 * INNER)
            x = self.add("swiglu", {"x": up, **scales}, INNER, self.activation)
            x = self.linear(x, HIDDEN)
        x = self.add("gather_rows", {"x": x}, HIDDEN)
        residual = self.add("gather_rows", {"x": residual}, HIDDEN)
        x = self.norm(x, residual, quantized=False)
        head = {"x": x, "weight": self.random(VOCAB, HIDDEN)}
        self.logits = self.add("linear", head, VOCAB, "float32")
        kv_dtype = FP8 if quantized else "bfloat16"
        self.kv_cache = torch.zeros((2, 40, 2, KV_HEADS, 32, SIZE)).to(getattr(torch, kv_dtype))

    def random(self, *shape: int) -> torch.Tensor:
        return random_tensor(shape, "bfloat16", self.generator, shape[-1] ** -0.5)

    def add(
        self,
        op: str,
        inputs: dict[str, torch.Tensor],
        width: int,
        dtype: str = "bfloat16",
        role: str = "out",
        **attributes: float,
    ) -> torch.Tensor:
        out = torch.zeros((TOKENS, width)).to(getattr(torch, dtype))
        self.calls.append(OpCall(op, f"{op}.{len(self.calls)}", inputs, {role: out}, attributes))
        return out

    def linear(self, x: torch.Tensor, width: int) -> torch.Tensor:
        weight = self.random(width, x.shape[1])
        if not self.quantized:
            return self.add("linear", {"x": x, "weight": weight}, width)
        scale = weight.float().abs().amax(1) / 448
        weight = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
        scales = {"weight_scale": scale, "x_scale": torch.tensor([0.01])}
        return self.add("linear", {"x": x, "weight": weight, **scales}, width)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, quantized: bool | None = None
    ) -> torch.Tensor:
        quantized = self.quantized if quantized is None else quantized
        inputs = {"x": x, "weight": self.random(HIDDEN) + 1}
        out = torch.zeros((TOKENS, HIDDEN)).to(getattr(torch, FP8 if quantized else "bfloat16"))
        outputs = {"out": out}
        if residual is not None:
            inputs["residual"] = outputs["residual_out"] = residual
        if quantized:
            inputs["scale"] = torch.tensor([0.01])
        self.calls.append(
            OpCall("rms_norm", f"norm.{len(self.calls)}", inputs, outputs, {"epsilon": 1e-5})
        )
        return out

    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        qkv = self.linear(x, (HEADS + 2 * KV_HEADS) * SIZE)
        angles = torch.rand((512, SIZE // 2), generator=self.generator) * 6.28
        rotary = torch.cat((angles.cos(), angles.sin()), dim=-1)
        scales = {"k_scale": torch.tensor([0.01]), "v_scale": torch.tensor([0.01])}
        scales = scales if self.quantized else {}
        inputs = {"qkv": qkv, "rotary": rotary, **scales}
        where = {"layer": layer, **SHAPE}
        width = HEADS * SIZE
        q = self.add("rope_kv_write", inputs, width, role="q", **where, epsilon=1e-5)
        inputs = {"q": q, **scales}
        if self.quantized:
            inputs["out_scale"] = torch.tensor([0.01])
        attributes = {**where, "softmax_scale": 0.25, "window": 0}
        out = self.add("paged_attention", inputs, width, self.activation, **attributes)
        return self.linear(out, HIDDEN)


def chunk_step(prompts: list[np.ndarray], parts: list[tuple[int, int, int]]) -> StepInputs:
    """A step of (request, start, stop) parts; request r owns blocks 4r to 4r + 3."""
    step, _ = make_step([(stop - start, start) for _, start, stop in parts])
    tables = [np.arange(4 * r, 4 * r + 4) for r, _, _ in parts]
    step.block_tables = np.array(tables, np.int32)
    ids = [prompts[r][start:stop] for r, start, stop in parts]
    step.token_ids = np.concatenate(ids).astype(np.int32)
    slots = [r * 128 + np.arange(start, stop) for r, start, stop in parts]
    step.slot_mapping = np.concatenate(slots).astype(np.int32)
    return step


@pytest.fixture
def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(0, VOCAB, n) for n in (1, 17, 70, 33, 64, 5)]


@pytest.mark.parametrize("quantized", [False, True])
def test_a_model_agrees_with_the_references_on_a_mixed_batch(quantized, prompts):
    results = []
    for program in (ReferenceProgram, cpu.CpuProgram):
        model = TinyModel(quantized)
        run = program(model.calls).run
        run(chunk_step(prompts, [(1, 0, 16), (2, 0, 64)]), model.kv_cache)
        run(chunk_step(prompts, [(3, 0, 33), (0, 0, 1), (1, 16, 17), (2, 64, 70)]), model.kv_cache)
        results.append((model.logits[:4].clone(), model.kv_cache.float()))
    (wanted, wanted_cache), (found, found_cache) = results
    error = (found - wanted).norm() / wanted.norm()
    assert error < (0.05 if quantized else 0.02)  # a rounding step that moved, through two layers
    assert (found_cache != wanted_cache).float().mean() < 0.05


@pytest.mark.parametrize("isa", [name for name in cpu.instruction_sets() if name != "generic"])
@pytest.mark.parametrize("quantized", [False, True])
def test_logits_have_the_same_bits_under_every_schedule(quantized, isa, prompts):
    """Alone and whole; then all requests in random chunks and random company."""
    cpu.set_instruction_set(isa)
    model = TinyModel(quantized)
    program = cpu.CpuProgram(model.calls)
    alone = []
    for request, prompt in enumerate(prompts):
        program.run(chunk_step(prompts, [(request, 0, len(prompt))]), model.kv_cache)
        alone.append(model.logits[0].clone())
    random = np.random.default_rng(7)
    for _ in range(5):
        model.kv_cache.view(torch.uint8).zero_()
        done = [0] * len(prompts)
        while any(n < len(p) for n, p in zip(done, prompts, strict=True)):
            parts, room = [], TOKENS
            for request in random.permutation(len(prompts)):
                left = len(prompts[request]) - done[request]
                count = min(left, room, int(random.integers(1, 40)))
                if left and count and random.random() < 0.7:
                    parts.append((int(request), done[request], done[request] + count))
                    done[request] += count
                    room -= count
            if not parts:
                continue
            cpu.set_num_threads(int(random.integers(1, 4)))
            program.run(chunk_step(prompts, parts), model.kv_cache)
            for row, (request, _, stop) in enumerate(parts):
                if stop == len(prompts[request]):
                    assert torch.equal(model.logits[row], alone[request])


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("token_ids", 2, VOCAB, "token_ids[2] is 131; it must be from 0 to 130"),
        ("token_ids", 0, -1, "token_ids[0] is -1"),
        ("slot_mapping", 1, 40 * 32, "slot_mapping[1] is 1280"),
        ("position_ids", 16, 600, "position_ids[16] is 600"),
        ("position_ids", 3, 2, "must increase"),
        ("logit_rows", 0, 17, "logit_rows[0] is 17"),
        ("block_tables", (0, 0), 40, "block_tables[0] is 40"),
        ("kv_len", 0, 129, "129 KV entries in 4 blocks"),
        ("cu_q", 1, 16, "cu_q runs from 0 to 16"),
    ],
)
def test_a_step_that_points_outside_its_tensors_is_caught(field, index, value, message, prompts):
    model = TinyModel(False)
    step = chunk_step(prompts, [(1, 0, 17)])
    getattr(step, field)[index] = value
    with pytest.raises(AssertionError) as failure:
        cpu.CpuProgram(model.calls).run(step, model.kv_cache)
    assert message in str(failure.value)


def test_a_step_larger_than_the_engine_is_caught(prompts):
    model = TinyModel(False)
    step = chunk_step([np.zeros(97, np.int32)], [(0, 0, 97)])
    with pytest.raises(AssertionError, match="97 rows in the step; .* at most 96"):
        cpu.CpuProgram(model.calls).run(step, model.kv_cache)


def test_a_cache_of_another_shape_is_caught(prompts):
    model = TinyModel(False)
    with pytest.raises(AssertionError, match="1 layers of 1 heads of 16"):
        cpu.CpuProgram(model.calls).run(chunk_step(prompts, [(0, 0, 1)]), model.kv_cache[:1])


def test_a_head_size_the_kernels_cannot_hold_is_refused_at_load():
    case = {**SPECS["paged_attention"].cases[0], "head_size": 514}
    with pytest.raises(Unsupported, match="head_size 514"):
        cpu.CpuProgram([make_example("paged_attention", case).call])


def test_a_call_that_breaks_its_spec_is_refused_at_load():
    call = make_example("linear", SPECS["linear"].cases[0]).call
    wrong = OpCall("linear", "l", {**call.inputs, "weight": torch.zeros(3, 3)}, call.outputs, {})
    with pytest.raises(CorruptEngine, match="'l'"):
        cpu.CpuProgram([wrong])


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
