"""Engine directories whose plans the fake package runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmctl.builder.build import run_build
from llmctl.builder.engine_format import TrtPiece
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.tensorrt.networks import PieceNetwork
from support.tensorrt.evaluated import networks_of, plan_engine
from support.tensorrt.fake_tensorrt import FakeModule


def with_plans(engine: EnginePlan, module: FakeModule, version: str | None = None) -> EnginePlan:
    """The engine with a plan of the fake package for every piece."""
    pieces, binaries = [], {}
    for name, network in networks_of(engine).items():
        data = module.write_plan(network)
        described = describe(name, network, len(data), module, version)
        pieces.append(described)
        binaries[described.tensor] = data
    return replace(engine, plan=replace(engine.plan, trt_pieces=tuple(pieces)), binaries=binaries)


def describe(
    name: str, network: PieceNetwork, num_bytes: int, module: FakeModule, version: str | None
) -> TrtPiece:
    """A piece as the engine says it is."""
    profiles = tuple(
        {
            "name": profile.name,
            "sizes": {dim: list(sizes) for dim, sizes in profile.sizes.items()},
            "layers": [{"kind": "gemm", "name": "l", "inputs": [], "outputs": []}],
            "activation_bytes": 1000,
            "scratch_bytes": 24,
        }
        for profile in network.profiles
    )
    bindings = tuple(asdict(binding) for binding in network.bindings)
    version = version or module.__version__
    return TrtPiece(name, num_bytes, module.name, version, bindings, profiles)


def write_fake_engine(checkpoint: Path, folder: Path, module: FakeModule, **options: Any) -> Path:
    """An engine directory for `module`."""
    run_build(with_plans(plan_engine(checkpoint, "tensorrt-rtx", **options), module), folder)
    return folder
