"""Medusa heads as torch modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OUTPUT = "common"  # path of the output matrix that all heads share


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Of the first linear of a head on. output: a head's "own" matrix, one "common" to all, or the
    "target"'s output projection."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    has_bias: bool
    output: str

    def linears(self) -> dict[str, str]:
        """Paths in the module -> published names of their modules."""
        blocks = {
            f"blocks.{head}.{layer}": f"{head}.{layer}.linear"
            for head in range(self.num_heads)
            for layer in range(self.num_layers)
        }
        own = {f"outputs.{head}": f"{head}.{self.num_layers}" for head in range(self.num_heads)}
        ends = {"own": own, "common": {OUTPUT: "lm_head"}, "target": {}}
        return blocks | ends[self.output]


def make_medusa(shape: MedusaShape, projection: torch.Tensor) -> Any:
    """A HeadModule without weights of its own; the target's projection it takes as it is."""
    from torch import nn
    from torch.nn.functional import linear, silu

    width, vocab = shape.hidden_size, shape.vocab_size

    class Medusa(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.ModuleList(
                    nn.Linear(width, width, bias=shape.has_bias, device="meta")
                    for _ in range(shape.num_layers)
                )
                for _ in range(shape.num_heads)
            )
            ends = {"own": shape.num_heads, "common": 0, "target": 0}[shape.output]
            self.outputs = nn.ModuleList(
                nn.Linear(width, vocab, bias=False, device="meta") for _ in range(ends)
            )
            if shape.output == "common":
                self.common = nn.Linear(width, vocab, bias=False, device="meta")

        def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
            found = []
            for index in range(shape.num_heads):
                x = hidden
                for layer in range(shape.num_layers):
                    x = x + silu(self.get_submodule(f"blocks.{index}.{layer}")(x))
                found.append(self._logits(index, x))
            return found

        def _logits(self, head: int, x: torch.Tensor) -> torch.Tensor:
            if shape.output == "target":
                return linear(x, projection)
            output: torch.Tensor = (
                self.common(x) if shape.output == "common" else self.outputs[head](x)
            )
            return output

    return Medusa().eval()
