"""What a CUDA program refuses, and how a step's integers are uploaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda_program import (
    LIMITS,
    SHAPE,
    STREAM,
    Recorder,
    binary,
    make_calls,
    make_program,
)

from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    KernelSpec,
    Launch,
)
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step
from llmctl.runtime.step import pack_rows

pytestmark = pytest.mark.usefixtures("kernels")


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


def test_steps_of_heads_have_rows_without_a_place_in_a_cache():
    """More rows than their one entry in it: they are no prompt's tokens."""
    program, _ = make_program()
    wanted = pack_rows(LIMITS.max_num_rows, [3, 0])
    program.upload(wanted, STREAM)
    assert program.step.logit_rows[:2].tolist() == [3, 0]
    assert not program.step.context_end[:1].any()


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


def test_ends_of_tokens_with_fp8_products_are_there_or_zero():
    limits = replace(LIMITS, max_num_tokens=600, max_seq_len=800)
    program, _ = make_program(limits=limits)
    step, _ = make_step([(256, 256), (1, 40)])
    step.context_end = np.array([512, 0], np.int32)
    program.upload(step, STREAM)
    assert program.step.context_end.tolist()[:2] == [512, 0]
    program.upload(replace(step, context_end=None), STREAM)
    assert program.step.context_end.tolist()[:2] == [0, 0]
    shorter, _ = make_step([(255, 256), (1, 40)])
    shorter.context_end = step.context_end
    with pytest.raises(AssertionError, match="less than a group"):  # no kernel would compute them
        program.upload(shorter, STREAM)


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
