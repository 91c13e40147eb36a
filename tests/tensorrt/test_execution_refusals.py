"""Plans that cannot be opened or run, and by which name each fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tensorrt.checkpoints import write_checkpoint
from support.tensorrt.evaluated import networks_of, plan_engine
from support.tensorrt.execution import STREAM, aligned, call_of, described, open_plans, real, shape
from support.tensorrt.fake_tensorrt import (
    FakeModule,
)

from llmctl.errors import CorruptEngine, DeviceFailure, OutOfMemory, RebuildNeeded
from llmctl.plugins.backends.tensorrt import packages
from llmctl.plugins.backends.tensorrt.execution import PlanSet
from llmctl.plugins.backends.tensorrt.plan_calls import PieceRunner


def test_another_version_of_rtx_that_takes_the_plan_may_run_it(module, networks) -> None:
    pieces, data = described(module, networks, version="1.6.0")
    assert PlanSet(module, pieces, data, aligned, STREAM).plans


@pytest.mark.parametrize(
    "fault, error, message",
    [
        ("deserialize", CorruptEngine, "cannot open the plan first: no deserialize today"),
        ("names", CorruptEngine, "binding 'foreign' is not described"),
        ("mode", CorruptEngine, "is an output"),
        ("dtype", CorruptEngine, "wanted"),
        ("rank", CorruptEngine, "has shape"),
        ("location", CorruptEngine, "lies in host memory"),
        ("context", OutOfMemory, "no execution context for the plan first: no context today"),
        ("profile", DeviceFailure, "refuses profile 0"),
    ],
)
def test_plans_that_cannot_be_opened_are_refused(fault, error, message, module, networks) -> None:
    module.faults.add(fault)
    with pytest.raises(error, match=message) as found:
        open_plans(module, networks)
    assert found.value.fix


@pytest.mark.parametrize(
    "fault, error, message",
    [
        ("shape", DeviceFailure, r"plan first: TensorRT refuses shape \(7,\) of token_ids"),
        ("address", DeviceFailure, "refuses an address for .*: no address today"),
        ("unspecified", CorruptEngine, "nobody gives the shape of token_ids"),
        ("execute", DeviceFailure, "refuses to run: no execute today"),
    ],
)
def test_steps_that_cannot_be_run_fail_by_name(
    fault, error, message, module, networks, env
) -> None:
    executor = PieceRunner(open_plans(module, networks))
    module.faults.add(fault)
    (run,) = executor.prepare(call_of(networks["first"]), env, shape(7, 0))
    with pytest.raises(error, match=message):
        run(STREAM)
    assert module.runs == []


def test_a_plan_of_another_version_is_refused_with_both(module, networks) -> None:
    module.faults.add("version")
    pieces, data = described(module, networks, version="1.6.0")
    message = r"built by tensorrt_rtx 1\.6\.0; 1\.7\.1 is installed .*diagnostics 32"
    with pytest.raises(RebuildNeeded, match=message) as found:
        PlanSet(module, pieces, data, aligned, STREAM)
    assert "pip install 'tensorrt-rtx==1.6.0'" in found.value.fix


def test_full_tensorrt_takes_plans_of_its_own_version_only(monkeypatch, networks) -> None:
    monkeypatch.setattr(packages, "_loggers", {})
    module = FakeModule(real, name="tensorrt", is_rtx=False)
    pieces, data = described(module, networks, version="10.9.0")
    with pytest.raises(RebuildNeeded, match="built by tensorrt 10.9.0"):
        PlanSet(module, pieces, data, aligned, STREAM)


def test_a_step_beyond_every_profile_is_an_engine_at_fault(module, networks, env) -> None:
    executor = PieceRunner(open_plans(module, networks))
    with pytest.raises(CorruptEngine, match="no profile of the plan first holds {'tokens': 601}"):
        executor.prepare(call_of(networks["first"]), env, shape(601, 1))


def test_a_cache_that_would_be_copied_is_refused(module, tmp_path) -> None:
    checkpoint = write_checkpoint(Path(tmp_path) / "c", "llama", "bfloat16")
    engine = plan_engine(checkpoint, "tensorrt-rtx", kv_cache_type="continuous")
    module.faults.add("alias")
    with pytest.raises(CorruptEngine, match="'cache_k_0_out' shares None, wanted cache_k_0"):
        open_plans(module, networks_of(engine))


def test_a_binding_that_is_not_aligned_is_a_bug(module, networks, env) -> None:
    executor = PieceRunner(open_plans(module, networks))
    call = call_of(networks["first"])
    name = next(iter(call.outputs))
    odd = replace(call, outputs={**call.outputs, name: call.outputs[name][64:]})
    (run,) = executor.prepare(odd, env, shape(7, 0))
    with pytest.raises(AssertionError, match=f"{name} lies at"):
        run(STREAM)
