"""Medusa heads made for tests, and what plain torch modules make of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def make_heads(
    num_heads: int, num_layers: int, hidden_size: int, vocab_size: int, seed: int = 0
) -> Tensors:
    """Random heads under their published names, in float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            weight = torch.randn((hidden_size, hidden_size), generator=generator)
            tensors[f"{head}.{layer}.linear.weight"] = weight / hidden_size**0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden_size, generator=generator)
        weight = torch.randn((vocab_size, hidden_size), generator=generator)
        tensors[f"{head}.{num_layers}.weight"] = weight / hidden_size**0.5
    return tensors


def save_heads(folder: Path, tensors: Tensors, config: str | None = None) -> Path:
    """A folder as the trainer writes it; its config says a wrong number of heads, as published."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(config or '{"medusa_num_heads": 2}')
    return folder


def fit_heads(
    model: torch.nn.Module, ids: list[int], num_heads: int, vocab_size: int, window: int = 256
) -> Tensors:
    """Heads of one block that know something of a text: blocks are random, output matrices are
    least squares over the hidden states of a transformers model. Seconds for a few thousand ids."""
    rows = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    with torch.no_grad():
        hidden = torch.cat([model.model(row[None]).last_hidden_state for row in rows])
    tensors = make_heads(num_heads, 1, hidden.shape[-1], vocab_size)
    for head, block in enumerate(torch_heads(tensors)):
        with torch.no_grad():
            x = block.get_submodule("0")(hidden[:, : -2 - head]).flatten(0, 1)
        targets = rows[:, 2 + head :].flatten()
        sums = torch.zeros(vocab_size, x.shape[1]).index_add_(0, targets, x)
        matrix = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), sums.T)
        tensors[f"{head}.1.weight"] = matrix.T.contiguous()
    return tensors


class ResBlock(torch.nn.Module):
    """A residual block as the Medusa paper gives it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


def torch_heads(tensors: Tensors) -> torch.nn.ModuleList:
    """The same heads as torch modules, whose state dict has the published names."""
    num_heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    num_layers = sum(name.startswith("0.") and name.endswith("bias") for name in tensors)
    vocab_size, hidden_size = tensors[f"0.{num_layers}.weight"].shape
    modules = torch.nn.ModuleList(
        torch.nn.Sequential(
            *(ResBlock(hidden_size) for _ in range(num_layers)),
            torch.nn.Linear(hidden_size, vocab_size, bias=False),
        )
        for _ in range(num_heads)
    )
    modules.load_state_dict(tensors)
    return modules.eval()
