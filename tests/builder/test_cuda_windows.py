"""Windows asked for of a cuda engine when it runs: it holds the kernels that they take."""

from __future__ import annotations

import pytest
import torch
from support.cuda_build import HEADS
from support.driver import RecordingDriver

from llmctl.builder.engine_format import read_engine_config
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls
from llmctl.runtime.engines.engine_file import EngineFile
from llmctl.runtime.engines.open_tensorrt import load_binaries
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.kv_cache.attention_windows import WindowOptions

LIMITS = {"max_batch_size": 2, "max_num_tokens": 48, "max_draft_len": 16, "max_seq_len": 128}


@pytest.fixture
def engine(new_model, save, build_engine, stand_ins):
    model = new_model("llama", dtype="bfloat16", **HEADS)
    return build_engine(save(model), backend="cuda", **LIMITS)


def attention_launches(folder, windows):
    """(kernel name, the arguments that come last) of one step's attention, of each layer."""
    file = EngineFile.open(folder, windows)
    arena = torch.zeros(file.plan.arena_bytes, dtype=torch.uint8)
    _, tensors = open_with_tables(folder)
    calls = make_calls(file.plan, bind_plan(file.plan, tensors, arena))
    driver = RecordingDriver()
    binaries = load_binaries(file.plan, file.ranks[0].tensors, "9.0")
    limits = step_limits(file.plan, read_engine_config(folder).build_config)
    program = CudaProgram(calls, binaries, limits, "cpu", driver)
    program.bind_kv_cache(torch.zeros(kv_cache_shape(file.plan, 4), dtype=torch.bfloat16))
    for tokens in (1, 17, 40):
        program.enqueue(StepShape(tokens, 1, 1, tokens, 100), 0)
    found = [(item.kernel, item.arguments) for item in driver.prepared]
    assert all(len(arguments) == len(kernel.arguments) for kernel, arguments in found)
    return [
        (kernel.name, arguments[-2:])
        for kernel, arguments in found
        if kernel.name.startswith("paged_attention")
    ]


def test_an_engine_holds_kernels_for_any_window_and_sinks(engine) -> None:
    plain = attention_launches(engine, WindowOptions())
    assert plain and not any("windows" in name for name, _ in plain)
    found = attention_launches(engine, WindowOptions((40, 128), 4))  # the second layer sees all
    assert len(found) == len(plain)
    asked = [last for name, last in found if "windows" in name]
    assert asked == [(36, 4)] * (len(found) // 2)
    assert [item for item in found if "windows" not in item[0]] == plain[1::2]
