"""Draft heads of the demo target in plain torch, and the folders that `llmctl build` reads.

Every head reads the target's last hidden rows, those that its output projection reads. Medusa heads
share that projection (tied to the embedding in the demo target), so that their own weights are few;
a ReDrafter head has one of its own and embeds tokens as the target does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MEDUSA_FILE, RECURRENT_FILE = "medusa_lm_head.safetensors", "model.safetensors"


class ResBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at first: an untrained head says what the target says."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class DraftHeads(Protocol):
    """What trains and is measured alike. hidden [n, hidden_size], tokens [n, num_depths]: what
    follows each row, the target's own token first."""

    num_depths: int

    def logits(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """[n, vocab] of each depth: what comes behind the first of the tokens, and so on."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def to(self, device: torch.device) -> Self: ...

    def write(self, folder: Path, base: str) -> None:
        """The folder that `build` reads, in BF16. `base` names the target."""


class MedusaHeads(nn.Module):
    """Head m says what follows m + 1 tokens after the hidden row's own next token."""

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, projection: Tensor | None = None
    ) -> None:
        super().__init__()
        self.num_depths, self.num_layers = num_heads, num_layers
        self._projection = (projection,)  # the target's, which is no parameter
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size) for _ in range(num_layers)))
            for _ in range(num_heads)
        )

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Of hidden [..., hidden_size] what each head gives to the output projection."""
        return [head(hidden) for head in self.heads]

    def logits(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """See DraftHeads; the tokens are not read."""
        (projection,) = self._projection
        assert projection is not None
        return [F.linear(x, projection) for x in self(hidden)]

    def write(self, folder: Path, base: str) -> None:
        """See DraftHeads: Medusa heads without output matrices ("version 2")."""
        state = {name.removeprefix("heads."): value for name, value in self.state_dict().items()}
        config = {
            "version": "2",
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": self.num_layers,
            "base_model_name_or_path": base,
        }
        _save(folder, MEDUSA_FILE, state, config)

    @classmethod
    def read(cls, folder: Path, projection: Tensor | None = None) -> MedusaHeads:
        """What `write` wrote, in FP32."""
        tensors = {f"heads.{n}": t.float() for n, t in load_file(folder / MEDUSA_FILE).items()}
        places = [tuple(map(int, name.split(".")[1:3])) for name in tensors]
        num_heads, num_layers = (1 + max(place) for place in zip(*places, strict=True))
        heads = cls(num_heads, num_layers, next(iter(tensors.values())).shape[-1], projection)
        heads.load_state_dict(tensors)
        return heads.eval()


class RecurrentHead(nn.Module):
    """A ReDrafter head: s = SiLU(W e + U s + b) over the embeddings of the tokens, and logits of
    what the hidden row and s give behind an input projection and a residual block. The names of
    the parameters are those that Apple's trainer writes."""

    def __init__(
        self, num_depths: int, exit_dim: int, embedding: Tensor, num_layers: int = 1
    ) -> None:
        super().__init__()
        vocab, width = embedding.shape
        self.num_depths = num_depths
        self._embedding = (embedding,)  # the target's, which is no parameter
        self.input_proj = nn.Linear(2 * width, exit_dim)
        layers = (ResBlock(exit_dim) for _ in range(num_layers))
        self.lm_head = nn.ModuleList((*layers, nn.Linear(exit_dim, vocab, bias=False)))
        self.rnn_u = nn.Linear(width, width)
        self.rnn_w = nn.Linear(width, width, bias=False)

    @torch.no_grad()
    def start_from(self, projection: Tensor) -> None:
        """Weights to begin training with: the best output matrix of this width for a target's
        [vocab, hidden_size], and of the hidden row what that reads."""
        width, exit_dim = projection.shape[1], self.input_proj.out_features
        projection = projection.float().cpu()
        _, vectors = torch.linalg.eigh(projection.T @ projection)
        axes = vectors[:, -min(exit_dim, width) :]  # [hidden_size, exit_dim], orthonormal
        output = self.lm_head[-1]
        assert isinstance(output, nn.Linear)
        output.weight[:, : axes.shape[1]] = projection @ axes
        self.input_proj.weight[: axes.shape[1], :width] = axes.T

    def logits(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """See DraftHeads."""
        state = torch.zeros_like(hidden)
        found = []
        for depth in range(self.num_depths):
            embedded = F.embedding(tokens[:, depth], self._embedding[0])
            state = F.silu(self.rnn_w(embedded) + self.rnn_u(state))
            x = self.input_proj(torch.cat([hidden, state], dim=-1))
            for part in self.lm_head:
                x = part(x)
            found.append(x)
        return found

    def write(self, folder: Path, base: str) -> None:
        """See DraftHeads: a folder as Apple's trainer saves it."""
        exit_dim, vocab = self.input_proj.out_features, len(self._embedding[0])
        config = {
            "model_type": "recurrent_drafting_drafter",
            "vocab_size": vocab,
            "hidden_size": self.rnn_w.in_features,
            "exit_dim": exit_dim,
            "num_draft_layers": len(self.lm_head) - 1,
            "rnn": True,
            "base_model_name_or_path": base,
        }
        _save(folder, RECURRENT_FILE, self.state_dict(), config)

    @classmethod
    def read(cls, folder: Path, num_depths: int, embedding: Tensor) -> RecurrentHead:
        """What `write` wrote, in FP32."""
        tensors = {name: t.float() for name, t in load_file(folder / RECURRENT_FILE).items()}
        num_layers = sum(name.endswith(".linear.weight") for name in tensors)
        head = cls(num_depths, len(tensors["input_proj.bias"]), embedding, num_layers)
        head.load_state_dict(tensors)
        return head.eval()


def _save(
    folder: Path, file: str, state: Mapping[str, Tensor], config: Mapping[str, object]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()
    }
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / file).chmod(0o644)  # save_file leaves 0600
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
