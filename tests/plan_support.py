"""Plans of planted shapes, as a build makes them, without weights or binaries."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from layers_support import write_config
from planted_shapes import SHAPES

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan
from llmctl.builder.generated import LoadFormat
from llmctl.builder.kernels import step_limits
from llmctl.plugins.cuda.kernel import StepLimits


@cache
def planned(
    name: str, kv_algo: str | None = "FP8", qformat: str | None = "fp8"
) -> tuple[Plan, StepLimits]:
    with TemporaryDirectory() as folder:
        write_config(Path(folder), SHAPES[name], kv_algo, qformat=qformat)
        built = plan_build(
            Path(folder),
            BuildRequest(max_batch_size=4, max_seq_len=4096),
            backend="cuda",
            compute_capability="9.0",
            load_format=LoadFormat("dummy"),
            with_binaries=False,
        )
    return built.plan, step_limits(built.plan, built.limits)
