"""What tests of TensorRT's execution share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llmctl.builder.engine_format import TENSORRT_OP, TrtPiece
from llmctl.builder.tensorrt.networks import PieceNetwork
from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.tensorrt.execution import PlanSet
from llmctl.plugins.core.calls import OpCall
from support.tensorrt.fake_engines import describe
from support.tensorrt.fake_tensorrt import (
    FakeModule,
)

real = pytest.importorskip("tensorrt_rtx", reason="the networks are TensorRT's")


STREAM = 1234


def aligned(num_bytes: int) -> torch.Tensor:
    raw = torch.zeros(num_bytes + 256, dtype=torch.uint8)
    return raw[-raw.data_ptr() % 256 :][:num_bytes]


def described(
    module: FakeModule, networks: dict[str, PieceNetwork], version: str | None = None
) -> tuple[list[TrtPiece], dict[str, bytes]]:
    data = {name: module.write_plan(network) for name, network in networks.items()}
    pieces = [describe(n, net, len(data[n]), module, version) for n, net in networks.items()]
    return pieces, data


def open_plans(module: FakeModule, networks: dict[str, PieceNetwork], **fields: Any) -> PlanSet:
    pieces, data = described(module, networks)
    return PlanSet(module, [replace(piece, **fields) for piece in pieces], data, aligned, STREAM)


def call_of(network: PieceNetwork, layer: int = 0) -> OpCall:
    """A call with its own memory for every binding but the step's arrays."""
    tensors = {
        binding.name: aligned(1 << 18)
        for binding in network.bindings
        if binding.name not in ("token_ids", "logit_rows")
    }
    outputs = {b.name: tensors.pop(b.name) for b in network.bindings if not b.is_input}
    piece = {"piece": network.name}
    return OpCall(TENSORRT_OP, f"layers.{layer}", tensors, outputs, piece)


def shape(tokens: int, rows: int) -> StepShape:
    return StepShape(tokens, 1, rows, tokens, tokens)
