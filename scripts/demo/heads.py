"""Draft heads of the demo target in plain torch, and the folders that `llmctl build` reads.

Every head reads the target's last hidden rows, those that its output projection reads, and shares
that projection (tied to the embedding in the demo target), so that its own weights are few.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MEDUSA_FILE = "medusa_lm_head.safetensors"


class ResBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at first: an untrained head says what the target says."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Head m says what follows m + 1 tokens after the hidden row's own next token."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size) for _ in range(num_layers)))
            for _ in range(num_heads)
        )

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Of hidden [..., hidden_size] what each head gives to the output projection."""
        return [head(hidden) for head in self.heads]

    def write(self, folder: Path, base: str) -> None:
        """The folder of Medusa heads without output matrices ("version 2"), in BF16. `base` names
        the target in its config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name.removeprefix("heads."): value for name, value in self.state_dict().items()}
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
        save_file(tensors, folder / MEDUSA_FILE, metadata={"format": "pt"})
        (folder / MEDUSA_FILE).chmod(0o644)  # save_file leaves 0600
        config = {
            "version": "2",
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": self.num_layers,
            "base_model_name_or_path": base,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> MedusaHeads:
        """What `write` wrote, in FP32."""
        tensors = {f"heads.{n}": t.float() for n, t in load_file(folder / MEDUSA_FILE).items()}
        places = [tuple(map(int, name.split(".")[1:3])) for name in tensors]
        num_heads, num_layers = (1 + max(place) for place in zip(*places, strict=True))
        heads = cls(num_heads, num_layers, next(iter(tensors.values())).shape[-1])
        heads.load_state_dict(tensors)
        return heads.eval()
