"""An EAGLE-3 head of the demo target in plain torch, unrolled over several steps for training, and
the folder that `llmctl build` reads. The names of the parameters are those of EAGLE's layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

EAGLE_FILE = "model.safetensors"
THETA = 10000.0


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The sizes of a head. taps: layers of the target whose inputs it reads."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    taps: tuple[int, ...]


class _Attention(nn.Module):
    """Projections of twice the width; see `EagleHead.unroll` for what attends to what."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        width, size = shape.hidden_size, shape.hidden_size // shape.num_heads
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.k_proj = nn.Linear(2 * width, shape.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, shape.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.size, self.groups = size, shape.num_heads // shape.num_kv_heads

    def heads(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [rows, heads, n, size] of x [rows, n, 2 width], rotated from position `first`."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        return self._rotate(q, first), self._rotate(k, first), v

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        half = self.size // 2
        speeds = THETA ** (-torch.arange(half, device=x.device).float() / half)
        angles = (first + torch.arange(x.shape[2], device=x.device))[:, None] * speeds
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Layer(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.self_attn = _Attention(shape)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, inner, bias=False),
                "up_proj": nn.Linear(width, inner, bias=False),
                "down_proj": nn.Linear(inner, width, bias=False),
            }
        )
        self.hidden_norm = nn.RMSNorm(width, 1e-5)
        self.input_layernorm = nn.RMSNorm(width, 1e-5)
        self.post_attention_layernorm = nn.RMSNorm(width, 1e-5)

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        """o, behind attention."""
        g = g + self.self_attn.o_proj(attended)
        x = self.post_attention_layernorm(g)
        gated = F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return g + self.mlp["down_proj"](gated)


class EagleHead(nn.Module):
    """kept: the tokens of its vocabulary, ascending. embedding: the target's, no parameter."""

    def __init__(self, shape: EagleShape, embedding: Tensor, kept: Tensor) -> None:
        super().__init__()
        self.shape, self.kept = shape, kept
        self._embedding = (embedding,)
        features = len(shape.taps) * embedding.shape[1]
        self.fc = nn.Linear(features, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, 1e-5)
        self.lm_head = nn.Linear(shape.hidden_size, len(kept), bias=False)

    def unroll(self, features: Tensor, following: Tensor, steps: int) -> list[Tensor]:
        """o [rows, n, width] of each step, as drafting would have it with the text for drafts.

        features [rows, n, ...]; following [rows, n + steps - 1]: the text from the token behind
        the first feature on. Step s of place i reads token i + 1 + s and what step s - 1 put out
        there, and sees the pairs up to i and its own of the steps since.
        """
        count, layer = features.shape[1], self.midlayer
        attention = layer.self_attn
        later = torch.ones(count, count, dtype=torch.bool, device=features.device).triu(1)
        g = self.fc(features).float()  # as sums stay where products are in BF16
        keys: list[tuple[Tensor, Tensor]] = []
        found = []
        for step in range(steps):
            token = F.embedding(following[:, step : step + count], self._embedding[0])
            x = torch.cat((layer.input_layernorm(token), layer.hidden_norm(g)), -1)
            q, k, v = attention.heads(x, step)
            keys.append((k, v))
            shared = (q @ keys[0][0].transpose(-1, -2)).masked_fill(later, float("-inf"))
            own = [(q * k).sum(-1, keepdim=True) for k, _ in keys[1:]]
            weights = torch.softmax(torch.cat((shared, *own), -1) / attention.size**0.5, -1)
            seen = weights[..., :count] @ keys[0][1]
            for number, (_, v) in enumerate(keys[1:]):
                seen = seen + weights[..., count + number, None] * v
            g = layer.finish(g, seen.transpose(1, 2).flatten(2))
            found.append(g)
        return found

    def logits(self, out: Tensor) -> Tensor:
        """Of o, over the head's vocabulary."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits

    def write(self, folder: Path, base: str) -> None:
        """The folder that `build` reads, in BF16. `base` names the target."""
        vocab, shape = len(self._embedding[0]), self.shape
        state = {
            name: value.to("cpu", torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }
        kept = self.kept.cpu()
        marked = torch.zeros(vocab, dtype=torch.bool)
        marked[kept] = True
        state |= {"d2t": kept - torch.arange(len(kept)), "t2d": marked}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / EAGLE_FILE, metadata={"format": "pt"})
        (folder / EAGLE_FILE).chmod(0o644)  # save_file leaves 0600
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": vocab,
            "draft_vocab_size": len(self.kept),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.taps)},
            "base_model_name_or_path": base,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path, embedding: Tensor) -> EagleHead:
        """What `write` wrote, in FP32."""
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / EAGLE_FILE)
        offsets = tensors.pop("d2t")
        del tensors["t2d"]
        shape = EagleShape(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        )
        kept = offsets + torch.arange(len(offsets))
        head = cls(shape, embedding, kept.to(embedding.device))
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return head.eval()
