"""What a plan says of its binaries and of the launches that take the place of operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import Plan, PlanKernel
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.schema import shown
from llmctl.builder.validation.strict_json import MOST
from llmctl.plugins.backends.backend import Backend
from llmctl.plugins.backends.cuda.arch import ARCHS

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

_POINTERS = ("*bf16", "*fp16", "*fp32", "*fp64", "*fp8e4nv", "*i8", "*i32", "*i64", "*u8")
ARGUMENTS = (*_POINTERS, "i32", "i64", "fp32", "tensor_map")
_MOST_THREADS, _MOST_REGISTERS, _MOST_CLUSTER, _MOST_HIDDEN = 1024, 255, 16, 2
_NUMBERS: Mapping[str, tuple[int, int]] = {  # of a kernel's metadata: least and most
    "threads": (32, _MOST_THREADS),
    "shared_bytes": (0, MOST),  # no more than its GPU has
    "cluster": (1, _MOST_CLUSTER),
    "num_hidden_arguments": (0, _MOST_HIDDEN),
    "registers": (0, _MOST_REGISTERS),
    "local_bytes": (0, MOST),
}
_FIELDS = {"name", "entry", "arguments", *_NUMBERS}


def check_binaries(config: EngineConfig, plan: Plan, backend: Backend) -> None:
    """Raises CorruptEngine. That the binaries are those that steps launch is asked in `kernels.py`,
    once the file is opened."""
    capabilities = _capabilities(config, backend)
    if not backend.on_gpu and (plan.kernels or plan.fused or plan.trt_pieces or plan.scratch_bytes):
        raise wrong(f"the plan has kernels, and backend {backend.name!r} has none of its own")
    if plan.trt_pieces and not backend.compiles_plans:
        raise wrong(f"the plan has plans of TensorRT on backend {backend.name!r}")
    labels = ("",) if len(capabilities) < 2 else capabilities
    names = set()
    for kernel in plan.kernels:
        if kernel.capability not in labels:
            raise wrong(f"kernel {kernel.name!r} is for {kernel.capability!r}, wanted {labels}")
        capability = kernel.capability or capabilities[0]
        _check_kernel(kernel, ARCHS[capability].max_shared_bytes)
        names.add((kernel.capability, kernel.name))
    if len(names) != len(plan.kernels):
        raise wrong(f"the plan has {len(plan.kernels)} kernels of {len(names)} names")
    known = {name for _, name in names}
    for fused in plan.fused:
        if not 0 <= fused.start < fused.stop <= len(plan.ops) or fused.kernel not in known:
            raise wrong(
                f"kernel {fused.kernel!r} takes the place of operators {fused.start} to "
                f"{fused.stop}; the plan has {len(plan.ops)} and "
                f"{'that' if fused.kernel in known else 'no such'} kernel"
            )


def _capabilities(config: EngineConfig, backend: Backend) -> tuple[str, ...]:
    found = config.compute_capability
    if not backend.on_gpu:
        if found is not None:
            raise wrong(f"compute_capability is {found!r} on backend {backend.name!r}")
        return ()
    named = tuple(str(found).split(","))
    if any(capability not in ARCHS for capability in named) or len(set(named)) != len(named):
        raise wrong(f"compute_capability is {found!r}; known are {', '.join(ARCHS)}")
    return named


def _check_kernel(kernel: PlanKernel, max_shared_bytes: int) -> None:
    """The launch metadata of one binary, as `CompiledKernel.metadata` writes it."""
    found: Mapping[str, Any] = kernel.metadata
    if set(found) != _FIELDS:
        odd = sorted(set(found) ^ _FIELDS)[0]
        raise wrong(f"kernel {kernel.name!r} has other metadata than is wanted: {odd!r}")
    for name, (low, high) in _NUMBERS.items():
        high = max_shared_bytes if name == "shared_bytes" else high
        if type(found[name]) is not int or not low <= found[name] <= high:
            raise wrong(
                f"kernel {kernel.name!r} has {name} {shown(found[name])}; {low} to {high} are "
                "wanted"
            )
    arguments, names = found["arguments"], (found["name"], found["entry"])
    if type(arguments) is not list or any(kind not in ARGUMENTS for kind in map(str, arguments)):
        raise wrong(f"kernel {kernel.name!r} has arguments {shown(arguments)}")
    if names[0] != kernel.name or type(names[1]) is not str or found["threads"] % 32:
        raise wrong(f"kernel {kernel.name!r} is called {names}, with {found['threads']} threads")
    if not 1 <= kernel.num_bytes <= MOST:
        raise wrong(f"kernel {kernel.name!r} has {kernel.num_bytes} bytes")
