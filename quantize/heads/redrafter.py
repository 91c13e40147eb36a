"""A ReDrafter head as a torch module: its steps behind a hidden row, along given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OUTPUT = "vocabulary"  # path of the output matrix: ModelOpt leaves out "lm_head" and "output"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """recurrence: "silu", "linear" or "sum" (builder/heads/redrafter/names.py)."""

    recurrence: str
    num_layers: int
    hidden_size: int
    exit_dim: int
    vocab_size: int
    num_steps: int

    def linears(self) -> dict[str, str]:
        """Paths in the module -> names of their modules in an engine."""
        first = {} if self.exit_dim == 2 * self.hidden_size else {"input_proj": "input_proj"}
        layers = {f"layers.{layer}": f"layers.{layer}.linear" for layer in range(self.num_layers)}
        recurrent = {} if self.recurrence == "sum" else {"rnn_w": "rnn_w", "rnn_u": "rnn_u"}
        return first | layers | {OUTPUT: "lm_head"} | recurrent

    def biases(self) -> tuple[str, ...]:
        """Those of `linears` that have one."""
        return tuple(path for path in self.linears() if path not in (OUTPUT, "rnn_w"))


def make_redrafter(shape: RecurrentShape, embedding: torch.Tensor) -> Any:
    """A HeadModule without weights of its own; the target's embedding it takes as it is."""
    import torch
    from torch import nn
    from torch.nn.functional import silu

    def linear(inputs: int, outputs: int, *, has_bias: bool = True) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=has_bias, device="meta")

    width, exit_dim = shape.hidden_size, shape.exit_dim
    paths = shape.linears()

    class ReDrafter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if "input_proj" in paths:
                self.input_proj = linear(2 * width, exit_dim)
            self.layers = nn.ModuleList(linear(exit_dim, exit_dim) for _ in range(shape.num_layers))
            self.vocabulary = linear(exit_dim, shape.vocab_size, has_bias=False)
            if "rnn_w" in paths:
                self.rnn_w = linear(width, width, has_bias=False)
                self.rnn_u = linear(width, width)

        def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
            state: torch.Tensor | None = None
            found = []
            for step in range(shape.num_steps):
                state = self._next(nn.functional.embedding(tokens[:, step], embedding), state)
                x = torch.cat((hidden, state), dim=-1)
                if "input_proj" in paths:
                    x = self.input_proj(x)
                for layer in self.layers:
                    x = x + silu(layer(x))
                found.append(self.vocabulary(x))
            return found

        def _next(self, e: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            if shape.recurrence == "sum":
                return e if state is None else e + state
            taken: torch.Tensor = self.rnn_w(e)
            if shape.recurrence == "linear":
                return taken if state is None else taken + self.rnn_u(state)
            return silu(taken + self.rnn_u(torch.zeros_like(e) if state is None else state))

    return ReDrafter().eval()
