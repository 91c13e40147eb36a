"""What the runtime asks of TensorRT is what the real package has: the fake adds nothing to it, and
without a GPU the real one refuses where the fake is told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tensorrt import fake_tensorrt
from support.tensorrt.checkpoints import write_checkpoint
from support.tensorrt.evaluated import networks_of, plan_engine
from support.tensorrt.fake_engines import describe

from llmctl.builder.tensorrt.compile import compile_network
from llmctl.builder.tensorrt.package import open_package
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.tensorrt.execution import PlanSet
from llmctl.plugins.backends.tensorrt.packages import load_package

real = pytest.importorskip("tensorrt_rtx", reason="the package itself is looked at")
PAIRS = {
    "Runtime": (fake_tensorrt.Runtime, real.Runtime),
    "ICudaEngine": (fake_tensorrt.Engine, real.ICudaEngine),
    "IExecutionContext": (fake_tensorrt.Context, real.IExecutionContext),
    "IRuntimeCache": (fake_tensorrt.RuntimeCache, real.IRuntimeCache),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_call_that_the_fake_answers_exists(name) -> None:
    fake, wanted = PAIRS[name]
    calls = {call for call in vars(fake) if not call.startswith("_")}
    assert calls and not calls - set(dir(wanted))


@pytest.mark.parametrize(
    "name",
    [
        "TensorIOMode",
        "TensorLocation",
        "ExecutionContextAllocationStrategy",
        "DynamicShapesKernelSpecializationStrategy",
        "CudaGraphStrategy",
        "EngineValidity",
    ],
)
def test_every_choice_that_the_fake_has_exists(name) -> None:
    choices = {choice.name for choice in getattr(fake_tensorrt, name)}
    assert choices <= set(getattr(real, name).__members__)


@pytest.mark.parametrize(
    "owner, names",
    [
        ("ICudaEngine", ["num_io_tensors", "device_memory_size_v2", "create_runtime_config"]),
        ("IExecutionContext", ["is_stream_capturable"]),
        ("Runtime", ["get_engine_validity"]),
        (
            "IRuntimeConfig",
            [
                "set_execution_context_allocation_strategy",
                "dynamic_shapes_kernel_specialization_strategy",
                "cuda_graph_strategy",
                "create_runtime_cache",
                "set_runtime_cache",
            ],
        ),
    ],
)
def test_what_is_set_or_looked_for_by_name_exists(owner, names) -> None:
    assert [name for name in names if not hasattr(getattr(real, owner), name)] == []


class Spy:
    """A builder that keeps the configurations it makes."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.configs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def create_builder_config(self) -> Any:
        self.configs.append(self._builder.create_builder_config())
        return self.configs[-1]


def test_plans_are_built_to_be_captured(tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16", num_hidden_layers=1)
    network = networks_of(plan_engine(checkpoint, "tensorrt-rtx"))["first"]
    spy = Spy(network.builder)
    compile_network(open_package("tensorrt-rtx"), replace(network, builder=spy), ["8.9"])
    (config,) = spy.configs
    assert config.get_flag(real.BuilderFlag.REQUIRE_USER_ALLOCATION)


def test_the_real_package_refuses_a_real_plan_without_a_gpu(tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16", num_hidden_layers=1)
    network = networks_of(plan_engine(checkpoint, "tensorrt-rtx"))["first"]
    package = open_package("tensorrt-rtx")
    data = compile_network(package, network, ["8.9"]).plan
    module = load_package("tensorrt-rtx")
    piece = describe("first", network, len(data), fake_tensorrt.FakeModule(module), None)
    with pytest.raises(Exception) as found:
        PlanSet(module, [piece], {"first": data}, lambda size: pytest.fail("opened"), 0)
    assert found.type.__name__ in ("CorruptEngine", "RebuildNeeded") and found.value.fix
    same = describe("first", network, len(data), fake_tensorrt.FakeModule(module), package.version)
    with pytest.raises(CorruptEngine, match="tensorrt_rtx .* cannot open the plan first"):
        PlanSet(module, [same], {"first": data}, lambda size: pytest.fail("opened"), 0)
