"""What is read from the builder's log, and what builds of real shapes cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx
from support.tensorrt.build import plan_engine, write_config
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.builder.tensorrt.compile import compile_network
from llmctl.builder.tensorrt.networks import build_networks
from llmctl.builder.tensorrt.package import Package
from llmctl.builder.tensorrt.report import describe_engine, kernels

_OPERAND = (
    "Dimensions: [-1,64], Strides: [64,1], StrideOrder: [1,0], Datatype: {}, Format: (Linear)"
)
_LOG = """Layers:
Name: __mye1_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: x
Name: o_proj.gemm [profile 1]_myl1_2, LayerType: gemm, Inputs: [ {{ Name: __my_1_myl1, {fp8} }}, \
{{ Name: o_proj.weight [profile 1], {fp8} }}], Constants: [ {{ Name: __my_c, {fp32} }}], \
Outputs: [ {{ Name: hidden_out, {half} }}], TacticName: __myelin, StreamId: 0
""".format(fp8=_OPERAND.format("FP8"), fp32=_OPERAND.format("Float"), half=_OPERAND.format("Half"))


def test_layers_are_sorted_by_profile_with_their_operands() -> None:
    lines = [
        ("VERBOSE", _LOG),
        ("INFO", "Total Activation Memory: 100 bytes"),
        ("INFO", "Max Scratch Memory: 7 bytes"),
        ("INFO", "Total Activation Memory: 200 bytes"),
    ]
    first, second = describe_engine(lines, ["generation", "context"])
    assert [layer["kind"] for layer in first["layers"]] == ["shape_call"] and not kernels(first)
    assert (first["activation_bytes"], first["scratch_bytes"]) == (100, 7)
    assert second["activation_bytes"] == 200
    assert second["layers"] == [
        {
            "kind": "gemm",
            "name": "o_proj.gemm",
            "inputs": [":fp8[-1,64]", "o_proj.weight:fp8[-1,64]"],
            "outputs": ["hidden_out:fp16[-1,64]"],
        }
    ]


def test_every_kernel_of_a_built_plan_is_understood(tmp_path: Path) -> None:
    engine = plan_engine(write_config(tmp_path, "fp8 per token"), max_seq_len=128)
    package = Package("tensorrt-rtx", tensorrt_rtx)
    networks = build_networks(
        engine.pieces, engine.limits, engine.config.plugin_config, tensorrt_rtx
    )
    for network in networks.values():
        for profile in compile_network(package, network, ("8.9",)).profiles:
            assert profile["layers"] and profile["activation_bytes"] > 0
            for layer in kernels(profile):
                operands = [*layer["inputs"], *layer["outputs"]]
                assert len(operands) > 1 and all("[" in operand for operand in operands), layer


class _TensorRT10:
    """The package as far as TensorRT 10 has it: it builds for the GPU that is there."""

    def __init__(self) -> None:
        self.absent = ("ComputeCapability",)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("absent", ()):
            raise AttributeError(name)
        return getattr(tensorrt_rtx, name)


def test_what_only_tensorrt_rtx_has_is_not_asked_of_tensorrt(tmp_path: Path) -> None:
    engine = plan_engine(write_checkpoint(tmp_path / "c", "llama", "float16"), max_seq_len=96)
    package = Package("tensorrt", _TensorRT10())
    networks = build_networks(
        engine.pieces, engine.limits, engine.config.plugin_config, package.trt
    )
    assert compile_network(package, networks["middle"], ("8.9",)).plan


def test_pieces_of_70b_are_built_in_a_minute_and_4_gb(repository: Path) -> None:
    command = [sys.executable, "-m", "scripts.tensorrt.bench_build", "70b", "70b-tp8", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 70B, pieces | first, middle, last |" in done.stdout
    assert "| 70B, one rank of 8, pieces |" in done.stdout
