"""Two small heads of a decoder, as a build mode records them and as plain torch computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import linear as multiply
from torch.nn.functional import silu as activate

from llmctl.builder.functional import (
    add,
    embedding,
    gather_rows,
    graph_input,
    graph_output,
    linear,
    parameter,
    silu,
)
from llmctl.builder.models.decoder import EMBEDDING, HIDDEN, LM_HEAD
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network, Tensor, recording
from llmctl.builder.plan import BASE
from llmctl.builder.speculative_modes import BuildMode, Facts
from support.checkpoint import edit

MODE = "medusa"


def record(model: ModelConfig, dtype: str, facts: Facts) -> list[Network]:
    """ "medusa": a residual block on chosen rows of what the base's output projection reads, and
    that projection again. "recurrent": a state that takes in a token, and the same projection."""

    def project(x: Tensor, graph: str) -> None:
        name = EMBEDDING if model.tie_word_embeddings else LM_HEAD
        weight = parameter(f"{name}.weight", model.vocab_size, model.hidden_size)
        graph_output("logits", linear(x, weight, name=f"{graph}.lm_head", dtype="float32"))

    def block(x: Tensor, residual: Tensor, graph: str) -> Tensor:
        width = model.hidden_size
        weight = parameter(f"{graph}.linear.weight", width, width)
        bias = parameter(f"{graph}.linear.bias", width)
        x = linear(x, weight, bias, name=f"{graph}.linear")
        return add(silu(x, name=f"{graph}.silu"), residual, name=f"{graph}.residual")

    with recording(Network(dtype, name="medusa")) as medusa:
        hidden = graph_input("hidden", "rows", model.hidden_size, source=(BASE, HIDDEN))
        chosen = gather_rows(hidden, name="medusa.gather_rows")
        project(block(chosen, chosen, "medusa"), "medusa")
    with recording(Network(dtype, name="recurrent")) as recurrent:
        table = parameter(f"{EMBEDDING}.weight", model.vocab_size, model.hidden_size)
        state = graph_input("state", "tokens", model.hidden_size)
        embedded = embedding(table, name="recurrent.embedding")
        state = block(embedded, state, "recurrent")
        graph_output("state", state)
        project(gather_rows(state, name="recurrent.gather_rows"), "recurrent")
    return [medusa, recurrent]


ROW = BuildMode(4, is_available=True, record_heads=record)


class TorchHeads:
    """The same heads with random weights, in float32."""

    def __init__(self, model: torch.nn.Module, width: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.weights: dict[str, torch.Tensor] = {}
        for graph in ("medusa", "recurrent"):
            weight = torch.randn((width, width), generator=generator) * width**-0.5
            self.weights[f"{graph}.linear.weight"] = weight
            self.weights[f"{graph}.linear.bias"] = torch.randn(width, generator=generator)
        self._embedding = model.get_input_embeddings().weight.detach().float()
        self._projection = model.get_output_embeddings().weight.detach().float()

    def add_to(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Store the heads beside the model; they compute with what was stored from then on."""
        self.weights = {name: x.to(dtype).float() for name, x in self.weights.items()}
        return edit(
            checkpoint,
            lambda tensors: tensors.update({n: x.to(dtype) for n, x in self.weights.items()}),
        )

    def medusa(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return multiply(self._block("medusa", hidden, hidden), self._projection)

    def recurrent(
        self, tokens: Sequence[int], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the next state, logits)."""
        state = self._block("recurrent", self._embedding[list(tokens)], state)
        return state, multiply(state, self._projection)

    def _block(self, graph: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        weights = (self.weights[f"{graph}.linear.{part}"] for part in ("weight", "bias"))
        return activate(multiply(x, *weights)) + residual
