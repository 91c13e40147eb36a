"""Our kernels between plans: an engine for an RTX GPU holds every kernel that its steps launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.driver import RecordingDriver
from support.tensorrt.checkpoints import write_checkpoint
from support.tensorrt.evaluated import plan_engine, weights_of

from llmctl.builder.engine_format import TENSORRT_OP
from llmctl.builder.engine_kernels import kernel_specs
from llmctl.builder.step_limits import step_limits
from llmctl.plugins.backends.cuda.compiler import runs_on, uses_pdl
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.device_loop import kernel as rounds
from llmctl.plugins.ops.kv_compact import kernel as kv_compact
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, make_calls

SHAPES = (
    StepShape(1, 1, 1, 1, 64),
    StepShape(20, 4, 20, 5, 96),
    StepShape(64, 1, 1, 64, 96),
    StepShape(40, 3, 3, 30, 64),
    StepShape(20, 4, 20, 5, 96, 5),
    StepShape(64, 1, 0, 64, 64),
)


class NoPlans:
    """Plans that do nothing."""

    def extents(self, call: Any) -> dict[str, Any]:
        return {}

    def prepare(self, call: Any, env: Any, shape: StepShape) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "capability, form",
    [  # FP8 engines refuse Ampere
        ("8.6", "bfloat16"),
        ("8.9", "bfloat16"),
        ("8.9", "fp8"),
        ("12.0", "fp8"),
    ],
)
def test_an_engine_holds_every_kernel_that_its_steps_launch(capability, form, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", form)
    engine = plan_engine(checkpoint, "tensorrt-rtx")
    plan = engine.plan
    limits = step_limits(plan, engine.config.build_config)
    specs = [spec for spec in kernel_specs(plan, limits) if runs_on(spec, capability)]
    assert all(spec.is_triton for spec in specs), "CUDA C++ is Hopper's"
    arena = torch.zeros(plan.arena_bytes + 256, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 256 :]
    calls = make_calls(plan, bind_plan(plan, weights_of(engine), arena))
    driver = RecordingDriver()
    program = CudaProgram(
        calls,
        [SimpleNamespace(name=spec.name, arguments=spec.arguments) for spec in specs],
        limits,
        "cpu",
        driver,
        use_pdl=uses_pdl(capability),
        runners={TENSORRT_OP: NoPlans()},
    )
    program.bind_kv_cache(
        torch.zeros(kv_cache_shape(plan, 8), dtype=getattr(torch, plan.kv_cache.dtype))
    )
    for shape in SHAPES:
        program.enqueue(shape, 0)
    names = {launch.kernel.name for launch in driver.enqueued}
    assert not any(launch.use_pdl for launch in driver.enqueued)
    for part in ("rope_kv_write", "paged_attention.generation", "paged_attention.context"):
        assert any(name.startswith(part) for name in names), part
    assert any(name.endswith(".trees") for name in names)
    cache = plan.kv_cache
    token_bytes = cache.head_size * getattr(torch, cache.dtype).itemsize
    kv_sizes = (cache.num_kv_heads, cache.tokens_per_block, token_bytes)
    beside = {
        spec.name
        for spec in (
            *sampling.kernels(131),
            *rounds.kernels(limits.max_batch_size, limits.max_draft_len, 131),
            *kv_compact.kernels(*kv_sizes),
        )
    }
    held = {spec.name for spec in specs}
    assert names | beside <= held
    # What is left serves windows that are asked for when an engine is opened.
    assert all(".windows" in name for name in held - names - beside)
