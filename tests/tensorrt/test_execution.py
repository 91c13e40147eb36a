"""How TensorRT's plans are bound and enqueued."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tensorrt.execution import STREAM, aligned, call_of, described, open_plans, real, shape
from support.tensorrt.fake_tensorrt import (
    SCRATCH_BYTES,
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
    ExecutionContextAllocationStrategy,
    FakeModule,
)

from llmctl.builder.engine_format import TENSORRT_OP
from llmctl.errors import DeviceFailure
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.tensorrt import packages
from llmctl.plugins.backends.tensorrt.execution import PlanSet
from llmctl.plugins.backends.tensorrt.plan_calls import PieceRunner
from llmctl.plugins.core.calls import OpCall, row_extents


def test_contexts_use_one_scratch_buffer_that_is_ours(module, networks) -> None:
    plans = open_plans(module, networks)
    assert [context.profile for context in module.contexts] == [0, 1] * 3
    scratch = {context.scratch for context in module.contexts}
    assert len(scratch) == 1 and scratch.pop()[1] == 2 * SCRATCH_BYTES
    for context in module.contexts:
        assert context.how.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        assert context.how.cuda_graph_strategy is CudaGraphStrategy.DISABLED
        strategy = context.how.dynamic_shapes_kernel_specialization_strategy
        assert strategy is DynamicShapesKernelSpecializationStrategy.NONE
    assert plans.is_capturable(STREAM)
    module.is_capturable = False
    assert not plans.is_capturable(STREAM)


def test_full_tensorrt_has_no_runtime_configuration(monkeypatch, networks) -> None:
    monkeypatch.setattr(packages, "_loggers", {})
    module = FakeModule(real, name="tensorrt", is_rtx=False)
    plans = open_plans(module, networks)
    user_managed = ExecutionContextAllocationStrategy.USER_MANAGED
    assert {context.how for context in module.contexts} == {user_managed}
    assert plans.is_capturable(STREAM)


def test_every_binding_gets_the_address_of_its_tensor(module, networks, env) -> None:
    executor = PieceRunner(open_plans(module, networks))
    call = call_of(networks["last"])
    module.faults.add("execute")
    (run,) = executor.prepare(call, env, shape(7, 3))
    with pytest.raises(DeviceFailure):
        run(STREAM)
    (context,) = [c for c in module.contexts if c.addresses]
    tensors = {**call.inputs, **call.outputs, "logit_rows": env.step.logit_rows}
    assert context.addresses == {name: t.data_ptr() for name, t in tensors.items()}
    assert context.shapes["logit_rows"] == (3,) and context.shapes["hidden"][0] == 7
    assert set(context.shapes) == {
        b.name for b in networks["last"].bindings if b.is_input and isinstance(b.shape[0], str)
    }


def test_a_piece_used_again_is_told_only_what_differs(module, networks, env, monkeypatch) -> None:
    monkeypatch.setattr("support.tensorrt.fake_tensorrt.Context._compute", lambda self: None)
    executor = PieceRunner(open_plans(module, networks))
    first, second = call_of(networks["last"], 1), call_of(networks["last"], 2)
    second = replace(second, outputs=first.outputs)
    runs = [executor.prepare(call, env, shape(7, 3))[0] for call in (first, second)]
    told: list[str] = []
    (context,) = [c for c in module.contexts if c.engine.piece.name == "last" and c.profile == 0]
    plain = context.set_tensor_address
    context.set_tensor_address = lambda name, at: told.append(name) or plain(name, at)
    for run in (runs[0], runs[0], runs[1]):
        told.clear()
        run(STREAM)
    assert set(told) == set(first.inputs), "outputs and the step's array lie where they did"
    runs[1](STREAM)
    assert context.num_shape_changes == len(context.shapes), "shapes are given once"
    assert [run.stream for run in module.runs] == [STREAM] * 4


def test_sizes_that_come_back_keep_contexts_whose_shapes_never_change(
    module, networks, env, monkeypatch
) -> None:
    """While a graph is captured, as a draft loop of steps of two tokens and of one is."""
    monkeypatch.setattr("support.tensorrt.fake_tensorrt.Context._compute", lambda self: None)
    executor = PieceRunner(open_plans(module, networks))
    before = len(module.contexts)
    call = call_of(networks["first"])
    for _ in range(2):
        for tokens in (2, 1, 5):
            (run,) = executor.prepare(call, env, shape(tokens, 1))
            run(STREAM)
    own = module.contexts[before:]
    assert [context.shapes["token_ids"] for context in own] == [(2,), (1,), (5,)]
    assert [context.num_shape_changes for context in own] == [1, 1, 1]
    assert len({context.scratch for context in module.contexts}) == 1
    for tokens in (6, 7, 8):  # prompts come in any length
        (run,) = executor.prepare(call, env, shape(tokens, 1))
        run(STREAM)
    assert len(module.contexts) == before + 3


@pytest.mark.parametrize(
    "found",
    [
        StepShape(3, 3, 3, 1, 9),  # no batch that is padded to
        StepShape(5, 2, 2, 4, 9),  # lengths differ
        StepShape(6, 1, 1, 6, 9),  # longer than a verification
        StepShape(2, 2, 0, 1, 9),  # no logits
    ],
)
def test_sizes_that_may_be_anything_get_no_context_of_their_own(
    found, module, networks, env
) -> None:
    executor = PieceRunner(open_plans(module, networks))
    before = len(module.contexts)
    executor.prepare(call_of(networks["first"]), env, found)
    assert len(module.contexts) == before


def test_contexts_of_a_plan_with_many_kernels_are_few(module, networks, monkeypatch) -> None:
    plans = open_plans(module, networks)
    monkeypatch.setattr("llmctl.plugins.backends.tensorrt.execution.KERNELS_OF_OWN_CONTEXTS", 2)
    assert [plans.keep("first", {"tokens": n}) for n in (1, 2, 3, 2)] == [True, True, False, True]
    assert plans.keep("last", {"tokens": 1, "rows": 1})


def test_what_rtx_compiled_is_kept_for_the_next_process(
    module, networks, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pieces, data = described(module, networks)
    for is_loaded in (False, True):
        module.contexts.clear()
        PlanSet(module, pieces, data, aligned, STREAM)
        caches = {context.how.cache for context in module.contexts}
        assert len(caches) == len(networks), "one for all contexts of a plan"
        assert all(cache.is_loaded == is_loaded for cache in caches)
    kept = list((tmp_path / "cache/llmctl/tensorrt").iterdir())
    assert len(kept) == len(networks)
    kept[0].write_bytes(b"of another GPU")
    assert PlanSet(module, pieces, data, aligned, STREAM).plans, "refused by the cache, not by us"


def test_a_cache_folder_that_cannot_be_written_is_no_failure(
    module, networks, monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_plans(module, networks).plans


@pytest.mark.parametrize("tokens, profile", [(1, 0), (512, 0), (513, 1), (600, 1)])
def test_the_profile_is_the_narrowest_that_holds_the_step(
    tokens, profile, module, networks, env, monkeypatch
) -> None:
    monkeypatch.setattr("support.tensorrt.fake_tensorrt.Context._compute", lambda self: None)
    executor = PieceRunner(open_plans(module, networks))
    (run,) = executor.prepare(call_of(networks["first"]), env, shape(tokens, 1))
    run(STREAM)
    assert module.runs[-1].profile == profile


def test_a_piece_without_a_row_to_compute_is_left_out(module, networks, env) -> None:
    executor = PieceRunner(open_plans(module, networks))
    assert executor.prepare(call_of(networks["last"]), env, shape(7, 0)) == []
    assert len(executor.prepare(call_of(networks["first"]), env, shape(7, 0))) == 1


def test_outputs_say_whether_they_have_tokens_or_rows(module, networks) -> None:
    executor = PieceRunner(open_plans(module, networks))
    assert dict(executor.extents(call_of(networks["last"]))) == {"logits": "rows"}
    assert set(executor.extents(call_of(networks["first"])).values()) == {"tokens"}


def test_what_our_kernels_compute_from_rows_of_a_piece_has_rows() -> None:
    gathered, everybody, out = (torch.zeros(8, 4) for _ in range(3))
    calls = [
        OpCall(TENSORRT_OP, "piece", {}, {"h": gathered, "k": everybody}, {"piece": "last"}),
        OpCall("packed_linear", "head", {"x": gathered}, {"out": out}, {}),
        OpCall("packed_linear", "next", {"x": everybody}, {"out": out}, {}),
    ]
    stated = {"piece": {"h": "rows", "k": "tokens"}}
    assert row_extents(calls, stated) == ["tokens", "rows", "tokens"]
