"""The CUDA program with a recorder in place of the driver: what is launched, uploaded and kept."""

from __future__ import annotations

import ctypes
import gc
import weakref
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda import program as program_module
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    KernelSpec,
    Launch,
    PointerTable,
    StepLimits,
    StepShape,
)
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step

LIMITS = StepLimits(
    max_num_tokens=96,
    max_num_rows=8,
    max_batch_size=4,
    max_seq_len=100,
    max_draft_len=3,
    tokens_per_block=32,
    kv_dtype="bfloat16",
)
SHAPE = StepShape(num_tokens=7, num_requests=2, num_rows=2, max_query_len=4, max_kv_len=60)
STREAM = 77


class Recorder:
    """Keeps what a program asks of the driver; copies are done when their event is waited for."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, ...], tuple[object, ...], bool, int]] = []
        self.loaded: list[str] = []
        self.copies: list[tuple[int, int, int, int]] = []
        self.events: list[Event] = []
        self.num_prepared = self.num_rebound = 0

    def make_current(self) -> None:
        pass

    def load(self, kernel: CompiledKernel) -> str:
        self.loaded.append(kernel.name)
        return kernel.name

    def prepare(self, loaded, grid, arguments, use_pdl):
        self.num_prepared += 1
        return Recorded(self, (loaded, grid, arguments, use_pdl))

    def rebind(self, launch: Recorded, tensors) -> Recorded:
        self.num_rebound += 1
        loaded, grid, arguments, use_pdl = launch.what
        arguments = tuple(tensors.get(at, kept) for at, kept in enumerate(arguments))
        return Recorded(self, (loaded, grid, arguments, use_pdl))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.copies.append((target, source, num_bytes, stream))
        ctypes.memmove(target, source, num_bytes)

    def make_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class Recorded:
    """A launch that only says that it was enqueued."""

    def __init__(self, recorder: Recorder, what: tuple[object, ...]) -> None:
        self.recorder, self.what = recorder, what

    def __call__(self, stream: int) -> None:
        self.recorder.launched.append((*self.what, stream))


class Event:
    """Counts: a copy's event must be waited for before its memory is written again."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self, stream: int) -> None:
        assert stream == STREAM
        self.recorded += 1

    def wait(self) -> None:
        self.waited += 1
        assert self.waited == self.recorded + 1  # never recorded counts as passed


def spec_of(call: OpCall) -> KernelSpec:
    return KernelSpec(f"{call.op}.sample", "x.cu", ("*bf16",), entry=call.op)


def binary(name: str) -> CompiledKernel:
    return CompiledKernel(name, "f", b"", 128, 0, ("*bf16",), 1, 0, 16, 0)


def launches(call: OpCall, env, shape: StepShape) -> list[Launch]:
    rows = env.count(shape)
    scratch = env.scratch("counter", (4,), torch.int32)
    tensor = call.inputs.get("x", call.inputs.get("weight"))
    layer = call.attributes.get("layer")
    cache = env.kv_cache if layer is None else env.kv_cache[int(layer)]
    arguments = (tensor, cache, scratch, call.outputs["out"])
    return [Launch(spec_of(call), (rows, 1, 1), arguments)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Operators whose launches say what they were asked for."""

    def load(op: str, part: str) -> ModuleType:
        module = ModuleType(f"{op}.{part}")
        module.launches = launches
        module.OWN_ROLES = frozenset({"weight", "x", "scale", "out"})
        return module

    monkeypatch.setattr(program_module, "operator_module", load)


def make_calls() -> list[OpCall]:
    """embedding -> gather -> quantize: tokens, then rows."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    hidden, rows = zeros(96, 16), zeros(8, 16)
    quantized = zeros(8, 16, dtype=torch.float8_e4m3fn)
    scale = torch.ones(1)
    return [
        OpCall("embedding", "e", {"weight": zeros(50, 16)}, {"out": hidden}, {}),
        OpCall("gather_rows", "g", {"x": hidden}, {"out": rows}, {}),
        OpCall("quantize", "q", {"x": rows, "scale": scale}, {"out": quantized}, {}),
    ]


def make_program(**changes) -> tuple[CudaProgram, Recorder]:
    recorder = Recorder()
    calls = make_calls()
    names = [f"{call.op}.sample" for call in calls]
    arguments = {"binaries": [binary(name) for name in names], "limits": LIMITS, **changes}
    program = CudaProgram(calls, device="cpu", driver=recorder, **arguments)
    program.bind_kv_cache(torch.zeros(1, 3, 2, 1, 32, 16))
    return program, recorder


def test_a_table_of_addresses_stays_when_the_launch_it_was_made_for_is_forgotten():
    kernels = [binary(f"{op}.sample") for op in ("embedding", "gather_rows", "quantize")]
    kernels.append(replace(binary("table.sample"), arguments=("*i64",)))
    program, recorder = make_program(binaries=kernels)
    tensors = (torch.zeros(8), None, torch.zeros(8, dtype=torch.uint8))
    spec = KernelSpec("table.sample", "x.cu", ("*i64",))

    def enqueue() -> weakref.ref[torch.Tensor]:
        program.launch([Launch(spec, (1, 1, 1), (PointerTable(tensors),))], STREAM)
        (table,) = recorder.launched.pop()[2]
        assert isinstance(table, torch.Tensor) and table.dtype == torch.int64
        assert table.tolist() == [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return weakref.ref(table)

    first = enqueue()
    for length in range(1, program_module.MAX_PREPARED + 2):  # whatever else is packed
        program.enqueue(replace(SHAPE, max_kv_len=length), STREAM)
    program.bind_kv_cache(torch.zeros(1, 3, 2, 1, 32, 16))
    gc.collect()
    assert first() is not None, "a captured graph would read what was freed"
    assert enqueue()() is first(), "one table for all that launch with these addresses"


def test_calls_are_launched_in_order_with_tokens_then_rows():
    program, recorder = make_program()
    program.enqueue(SHAPE, STREAM)
    assert [(name, grid[0]) for name, grid, *_ in recorder.launched] == [
        ("embedding.sample", 7),
        ("gather_rows.sample", 2),
        ("quantize.sample", 2),
    ]
    assert all(pdl and stream == STREAM for *_, pdl, stream in recorder.launched)


def test_a_call_is_packed_once_for_each_count_of_its_tokens_or_rows():
    program, recorder = make_program()
    for _ in range(3):
        program.enqueue(SHAPE, STREAM)
        program.enqueue(replace(SHAPE, num_tokens=5), STREAM)
        program.enqueue(replace(SHAPE, max_kv_len=61), STREAM)
    assert recorder.num_prepared == 3 + 1 and len(recorder.launched) == 27
    assert [grid[0] for _, grid, *_ in recorder.launched[:9]] == [7, 2, 2, 5, 2, 2, 7, 2, 2]


def test_what_depends_on_requests_is_packed_for_each_shape(monkeypatch):
    monkeypatch.setattr(program_module, "_BY_REQUEST", {"embedding"})
    program, recorder = make_program()
    for _ in range(2):
        program.enqueue(SHAPE, STREAM)
        program.enqueue(replace(SHAPE, max_kv_len=61), STREAM)
    assert recorder.num_prepared == 3 + 1


def test_like_layers_are_packed_once_and_rebound(monkeypatch):
    monkeypatch.setattr(program_module, "_BY_REQUEST", {"embedding"})

    def layer(number: int, rows: int = 50, scale: float = 1.0, **more: torch.Tensor) -> OpCall:
        tensors = {"weight": torch.zeros(rows, 16, dtype=torch.bfloat16), **more}
        attributes = {"layer": number, "scale": scale}
        return OpCall("embedding", f"e{number}", tensors, {"out": torch.zeros(96, 16)}, attributes)

    monkeypatch.setattr(program_module, "check_call", lambda call: None)
    monkeypatch.setattr(program_module, "row_extents", lambda calls, _: ["tokens"] * len(calls))
    mask = torch.zeros(4)
    calls = [layer(0), layer(1), layer(2, scale=2.0), layer(3, rows=64), layer(4)]
    calls += [layer(5, mask=mask), layer(6, mask=torch.zeros(4)), layer(7, mask=mask)]
    recorder = Recorder()
    program = CudaProgram(calls, [binary("embedding.sample")], LIMITS, "cpu", recorder)
    cache = torch.zeros(8, 3, 2, 1, 32, 16)
    program.bind_kv_cache(cache)
    for shape in (SHAPE, replace(SHAPE, num_requests=1), SHAPE):
        program.enqueue(shape, STREAM)
    assert (recorder.num_prepared, recorder.num_rebound) == (2 * 5, 2 * 3)  # 1, 4 and 7
    for place, (_, grid, arguments, _, stream) in enumerate(recorder.launched):
        call = calls[place % len(calls)]
        assert arguments[0] is call.inputs["weight"] and arguments[3] is call.outputs["out"]
        assert arguments[1].data_ptr() == cache[call.attributes["layer"]].data_ptr()
        assert grid == (7, 1, 1) and stream == STREAM
    program.bind_kv_cache(torch.zeros(8, 3, 2, 1, 32, 16))
    program.enqueue(SHAPE, STREAM)
    assert recorder.num_prepared == 3 * 5  # another cache: nothing of the old one
    program.forget()
    program.enqueue(SHAPE, STREAM)
    assert recorder.num_prepared == 4 * 5


def test_what_is_prepared_is_packed_and_not_launched(monkeypatch):
    monkeypatch.setattr(program_module, "_BY_REQUEST", {"gather_rows"})
    program, recorder = make_program()
    program.prepare(SHAPE)
    assert recorder.num_prepared == 2 and not recorder.launched
    program.enqueue(SHAPE, STREAM)
    assert recorder.num_prepared == 3 and len(recorder.launched) == 3


def test_what_was_used_least_recently_is_packed_again(monkeypatch):
    monkeypatch.setattr(program_module, "MAX_PREPARED", 2)
    monkeypatch.setattr(program_module, "MAX_COUNTS", 2)
    program, recorder = make_program()
    for tokens in (1, 2, 3):  # 3 displaces 1
        program.enqueue(replace(SHAPE, num_tokens=tokens), STREAM)
    packed = recorder.num_prepared
    program.enqueue(replace(SHAPE, num_tokens=2), STREAM)
    assert recorder.num_prepared == packed
    program.enqueue(replace(SHAPE, num_tokens=1), STREAM)
    assert recorder.num_prepared == packed + 1
    program.enqueue(replace(SHAPE, num_tokens=2), STREAM)  # 1 displaced 3
    assert recorder.num_prepared == packed + 1


def test_another_cache_packs_again_with_its_address():
    program, recorder = make_program()
    program.enqueue(SHAPE, STREAM)
    cache = torch.zeros(1, 9, 2, 1, 32, 16)
    program.bind_kv_cache(cache)
    program.enqueue(SHAPE, STREAM)
    assert recorder.launched[-1][2][1] is cache


def test_scratch_of_one_name_is_one_zeroed_tensor():
    program, recorder = make_program()
    program.enqueue(SHAPE, STREAM)
    found = {arguments[2].data_ptr() for _, _, arguments, *_ in recorder.launched}
    assert found == {program.scratch("counter", (4,), torch.int32).data_ptr()}
    assert not program.scratch("counter", (4,), torch.int32).any()
    with pytest.raises(AssertionError, match="counter"):
        program.scratch("counter", (5,), torch.int32)


def test_launches_beside_the_program_go_to_the_same_stream():
    program, recorder = make_program()
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    program.launch(
        [Launch(KernelSpec("quantize.sample", "x.cu", ("*bf16",)), (3, 1, 1), (tensor,))], 5
    )
    assert recorder.launched == [("quantize.sample", (3, 1, 1), (tensor,), True, 5)]


def test_a_kernel_that_the_engine_lacks_is_named():
    program, _ = make_program(binaries=[binary("embedding.sample")])
    with pytest.raises(CorruptEngine, match=r"no kernel 'gather_rows\.sample'"):
        program.enqueue(SHAPE, STREAM)


def test_a_kernel_of_another_version_is_named_instead_of_launched():
    program, recorder = make_program()
    changed = KernelSpec("quantize.sample", "x.cu", ("*bf16", "i32"))
    with pytest.raises(CorruptEngine, match=r"another version .*'quantize\.sample'") as refused:
        program.launch([Launch(changed, (3, 1, 1), (torch.zeros(4), 1))], STREAM)
    assert refused.value.fix == "build the engine again" and not recorder.launched


def test_a_call_that_breaks_its_spec_is_refused():
    calls = make_calls()
    wrong = OpCall("embedding", "e", {"weight": torch.zeros(3)}, calls[0].outputs, {})
    with pytest.raises(CorruptEngine, match="'e'"):
        CudaProgram([wrong], [], LIMITS, "cpu", Recorder())


def found_arrays(step: DeviceStep, wanted) -> None:
    for name in ("token_ids", "position_ids", "cu_q", "kv_len", "slot_mapping", "logit_rows"):
        values = getattr(wanted, name)
        assert np.array_equal(getattr(step, name)[: len(values)].numpy(), values), name
    rows, width = wanted.block_tables.shape
    assert np.array_equal(step.block_tables[:rows, :width].numpy(), wanted.block_tables)


def test_an_upload_is_one_copy_that_ends_behind_the_tables_in_use():
    program, recorder = make_program()
    step, _ = make_step([(5, 40), (1, 0)])
    program.upload(step, STREAM)
    ((target, _, num_bytes, stream),) = recorder.copies
    found_arrays(program.step, step)
    assert stream == STREAM and target == program.step.token_ids.data_ptr()
    end = program.step.block_tables.data_ptr() + 2 * program.step.block_tables.shape[1] * 4
    assert target + num_bytes == end


def test_arrays_have_their_maximum_sizes_and_aligned_addresses():
    step = make_program()[0].step
    assert step.token_ids.shape == step.position_ids.shape == step.slot_mapping.shape == (96,)
    assert step.cu_q.shape == (5,) and step.kv_len.shape == (4,) and step.logit_rows.shape == (8,)
    assert step.block_tables.shape == (4, 4)  # 100 tokens in blocks of 32
    for name in DeviceStep.__dataclass_fields__:
        array = getattr(step, name)
        assert array.data_ptr() % 16 == 0 and array.is_contiguous() and array.dtype == torch.int32


def test_pinned_memory_is_written_again_only_after_its_copy_is_done():
    program, recorder = make_program()
    for tokens in range(1, 12):  # Event.wait asserts the order
        step, _ = make_step([(tokens, 3)], seed=tokens)
        program.upload(step, STREAM)
        found_arrays(program.step, step)
    sources = [source for _, source, *_ in recorder.copies]
    assert len(set(sources)) == len(recorder.events) > 1
    assert (
        sources[: len(recorder.events)] == sources[len(recorder.events) :][: len(recorder.events)]
    )


@pytest.mark.parametrize(
    "requests", [[(97, 0)], [(1, 0)] * 5, [(1, 140)]], ids=["tokens", "requests", "blocks"]
)
def test_a_step_larger_than_the_engine_is_a_bug_that_is_caught(requests):
    program, recorder = make_program()
    with pytest.raises(AssertionError):
        program.upload(make_step(requests)[0], STREAM)
    assert not recorder.copies
