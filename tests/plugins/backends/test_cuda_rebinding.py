"""Launches that a layer takes over from another are those that it would have described."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from support.driver import Prepared, RecordingDriver

from llmctl.builder.engine_format import Plan
from llmctl.builder.engine_kernels import fused_calls, kernel_specs, meta_cache
from llmctl.plugins.backends.cuda import program as program_module
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    StepLimits,
    StepShape,
    TensorMap,
)
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.rebinding import Packed, look, model_of
from llmctl.plugins.core.calls import OpCall
from scripts.bench.plan_support import bound, planned

SHAPES = [  # one token, a verification, batches, prompts, and a chunk without logits
    StepShape(num_tokens=1, num_requests=1, num_rows=1, max_query_len=1, max_kv_len=600),
    StepShape(num_tokens=2, num_requests=1, num_rows=2, max_query_len=2, max_kv_len=4096),
    StepShape(num_tokens=4, num_requests=4, num_rows=4, max_query_len=1, max_kv_len=600),
    StepShape(num_tokens=11, num_requests=1, num_rows=4, max_query_len=11, max_kv_len=600),
    StepShape(num_tokens=100, num_requests=2, num_rows=2, max_query_len=90, max_kv_len=600),
    StepShape(num_tokens=777, num_requests=3, num_rows=3, max_query_len=775, max_kv_len=2000),
    StepShape(num_tokens=512, num_requests=1, num_rows=0, max_query_len=512, max_kv_len=2000),
]
MODELS = [
    *(("8b", "FP8", "fp8"), ("8b", "FP8", "w4a8_mxfp4_fp8"), ("1b", "INT8", "fp8")),
    *(("3b", None, None), ("1b", "FP8", None)),
]


def enqueued(
    plan: Plan, limits: StepLimits, calls: Sequence[OpCall], cache: torch.Tensor
) -> RecordingDriver:
    """What steps of all shapes enqueue, one after the other."""
    driver = RecordingDriver()
    program = CudaProgram(
        calls, kernel_specs(plan, limits), limits, "meta", driver, fused=fused_calls(plan, limits)
    )
    program.bind_kv_cache(cache)
    for shape in SHAPES:
        program.enqueue(shape, 0)
    return driver


def told(launch: Prepared, shared: set[int]) -> tuple[object, ...]:
    """A launch as it can be compared with another program's: which of the shared tensors it is
    given, and where in which scratch or step array."""

    def argument(value: object) -> object:
        if isinstance(value, TensorMap):
            return argument(value.tensor), value.box_rows, value.box_columns, value.swizzle
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            which = storage._cdata if storage._cdata in shared else storage.nbytes()
            return which, value.storage_offset(), value.shape, value.dtype
        return value

    return launch.kernel.name, launch.grid, tuple(map(argument, launch.arguments))


@pytest.mark.parametrize(("name", "kv_algo", "qformat"), MODELS)
def test_what_is_rebound_is_what_would_be_packed(monkeypatch, name, kv_algo, qformat):
    plan, limits = planned(name, kv_algo, qformat)
    calls, cache = bound(plan), meta_cache(plan, limits)
    tensors = [x for call in calls for x in (*call.inputs.values(), *call.outputs.values())]
    shared = {tensor.untyped_storage()._cdata for tensor in (*tensors, cache)}
    rebound = enqueued(plan, limits, calls, cache)
    monkeypatch.setattr(program_module, "look", lambda *_: None)
    packed = enqueued(plan, limits, calls, cache)
    assert packed.num_rebound == 0 and rebound.num_rebound > len(rebound.prepared) // 2
    pairs = zip(rebound.enqueued, packed.enqueued, strict=True)
    assert all(told(a, shared) == told(b, shared) for a, b in pairs)


def test_a_call_is_no_model_where_something_else_follows_from_its_own_tensors():
    own = [torch.zeros(4), torch.zeros(8)]
    spec = KernelSpec("f", "x.cu", ("*fp32", "*fp32", "i32"))

    def places(*arguments: torch.Tensor) -> list[dict[int, int]] | None:
        launch = Launch(spec, (1, 1, 1), (*arguments, 7))
        return model_of(1, Packed([], [launch]), own).places

    assert places(own[0], own[1]) == [{0: 0, 1: 1}]
    assert places(own[1], own[1].view(2, 4)) is None  # the first is missing
    assert places(own[0], own[1][4:]) is None  # and here the second


def test_calls_look_alike_where_the_same_of_their_own_tensors_are_one(monkeypatch):
    module = SimpleNamespace(OWN_ROLES=frozenset({"weight", "k_scale", "v_scale"}))
    x, one = torch.zeros(4), torch.ones(1)

    def call(layer: int, k_scale: torch.Tensor, v_scale: torch.Tensor, **more: object) -> OpCall:
        inputs = {"x": x, "weight": torch.zeros(4), "k_scale": k_scale, "v_scale": v_scale}
        attributes = {"layer": layer, "epsilon": 1e-5, **more}
        return OpCall("op", f"call{layer}", inputs, {}, attributes)

    apart = [look(call(i, torch.ones(1), torch.ones(1)), "tokens", module) for i in range(2)]
    assert apart[0] == apart[1] is not None
    assert look(call(2, one, one), "tokens", module) != apart[0]
    assert look(call(3, torch.ones(1), torch.ones(1)), "rows", module) != apart[0]
    assert look(call(4, torch.ones(1), torch.ones(1), epsilon=1e-6), "tokens", module) != apart[0]
    assert look(call(5, one, one), "tokens", SimpleNamespace()) is None
