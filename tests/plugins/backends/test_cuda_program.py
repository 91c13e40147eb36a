"""The CUDA program with a recorder in place of the driver: what is launched and kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from support.cuda_program import (
    LIMITS,
    SHAPE,
    STREAM,
    Recorder,
    binary,
    make_program,
)

from llmctl.plugins.backends.cuda import program as program_module
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    PointerTable,
)
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import OpCall

pytestmark = pytest.mark.usefixtures("kernels")


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
    monkeypatch.setattr(program_module, "_BY_SHAPE", {"embedding"})
    program, recorder = make_program()
    for _ in range(2):
        program.enqueue(SHAPE, STREAM)
        program.enqueue(replace(SHAPE, max_kv_len=61), STREAM)
    assert recorder.num_prepared == 3 + 1


def test_like_layers_are_packed_once_and_rebound(monkeypatch):
    monkeypatch.setattr(program_module, "_BY_SHAPE", {"embedding"})

    def layer(number: int, rows: int = 50, scale: float = 1.0, **more: torch.Tensor) -> OpCall:
        tensors = {"weight": torch.zeros(rows, 16, dtype=torch.bfloat16), **more}
        attributes = {"layer": number, "scale": scale}
        return OpCall("embedding", f"e{number}", tensors, {"out": torch.zeros(96, 16)}, attributes)

    monkeypatch.setattr(program_module, "check_call", lambda call: None)
    monkeypatch.setattr(program_module, "row_extents", lambda calls, *_: ["tokens"] * len(calls))
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
    monkeypatch.setattr(program_module, "_BY_SHAPE", {"gather_rows"})
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
