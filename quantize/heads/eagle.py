"""An EAGLE-3 head as a torch module: its steps behind each position of a text, along the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OUTPUT = "vocabulary"  # path of the output matrix: ModelOpt leaves out "lm_head" and "output"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class EagleShape:
    """rotary: (first position, last) -> the table of RoPE [positions, head_size], half of it
    cosines and half sines (builder/rope.py)."""

    num_taps: int
    target_hidden: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    vocab_size: int  # of the target
    draft_vocab_size: int
    norm_before_residual: bool
    has_qk_norm: bool
    has_embedding: bool
    num_steps: int
    rotary: Callable[[int, int], torch.Tensor]

    def linears(self) -> dict[str, str]:
        """Paths in the module -> names of their modules, the layer's behind `layers.0`."""
        attention = {part: f"layers.0.self_attn.{part}" for part in _ATTENTION}
        return {
            "fc": "fc",
            **attention,
            **{p: f"layers.0.mlp.{p}" for p in _MLP},
            OUTPUT: "lm_head",
        }

    def kept(self) -> dict[str, str]:
        """Paths of parameters that stay as they are -> their names."""
        found = {name: f"layers.0.{name}.weight" for name in _LAYER_NORMS} | {"norm": "norm.weight"}
        if self.has_qk_norm:
            found |= {f"{part}_norm": f"layers.0.self_attn.{part}_norm.weight" for part in "qk"}
        if self.has_embedding:
            found["embedding"] = "embed_tokens.weight"
        return found


def make_eagle(shape: EagleShape, embedding: torch.Tensor, offsets: torch.Tensor | None) -> Any:
    """A HeadModule without weights of its own, which attends: `hidden` are features side by side.

    Step s of place i reads token i + 1 + s and what step s - 1 put out there, sees the pairs up to
    i and its own of the steps since, and says what follows. embedding: the target's; offsets: d2t,
    where the vocabulary is reduced.
    """
    import torch
    from torch import nn
    from torch.nn.functional import embedding as embed
    from torch.nn.functional import silu

    width, size = shape.hidden_size, shape.head_size
    groups = shape.num_heads // shape.num_kv_heads
    sizes = {
        "fc": (shape.num_taps * shape.target_hidden, width),
        "q_proj": (2 * width, shape.num_heads * size),
        "k_proj": (2 * width, shape.num_kv_heads * size),
        "v_proj": (2 * width, shape.num_kv_heads * size),
        "o_proj": (shape.num_heads * size, width),
        "gate_proj": (width, shape.intermediate_size),
        "up_proj": (width, shape.intermediate_size),
        "down_proj": (shape.intermediate_size, width),
        OUTPUT: (width, shape.draft_vocab_size),
    }
    lengths = {"q_norm": (size,), "k_norm": (size,), "embedding": (shape.vocab_size, width)}

    def rotate(x: torch.Tensor, first: int) -> torch.Tensor:
        """x [heads, positions, size], from a position on."""
        table = shape.rotary(first, first + x.shape[1]).to(x)
        cos, sin = table.chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Eagle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, (inputs, outputs) in sizes.items():
                self.add_module(name, nn.Linear(inputs, outputs, bias=False, device="meta"))
            for name in shape.kept():
                empty = torch.empty(lengths.get(name, (width,)), device="meta")
                self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

        def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
            g = self._product("fc", hidden)
            keys: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            table = self.get_parameter("embedding") if shape.has_embedding else embedding
            for step in range(shape.num_steps):
                e = self._norm("input_layernorm", embed(tokens[:, step], table))
                normal = self._norm("hidden_norm", g)
                seen = self._attend(torch.cat((e, normal), -1), step, keys, values)
                g = seen + (normal if shape.norm_before_residual else g)
                x = self._norm("post_attention_layernorm", g)
                g = g + self._product(
                    "down_proj", silu(self._product("gate_proj", x)) * self._product("up_proj", x)
                )
                yield self._logits(self._product("vocabulary", self._norm("norm", g)))

        def _attend(
            self, x: torch.Tensor, step: int, keys: list[torch.Tensor], values: list[torch.Tensor]
        ) -> torch.Tensor:
            count = len(x)
            q, k, v = (
                self._product(f"{part}_proj", x).view(count, -1, size).transpose(0, 1)
                for part in "qkv"
            )
            if shape.has_qk_norm:
                q, k = self._norm("q_norm", q), self._norm("k_norm", k)
            q, k = rotate(q, step), rotate(k, step).repeat_interleave(groups, 0)
            keys.append(k)
            values.append(v.repeat_interleave(groups, 0))
            later = torch.ones((count, count), dtype=torch.bool, device=x.device).triu(1)
            shared = (q @ keys[0].transpose(-1, -2)).masked_fill(later, float("-inf"))
            own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
            weights = torch.softmax(torch.cat((shared, *own), -1).float() / size**0.5, -1).to(x)
            seen = weights[..., :count] @ values[0]
            for number, v in enumerate(values[1:]):
                seen = seen + weights[..., count + number, None] * v
            return self._product("o_proj", seen.transpose(0, 1).reshape(count, -1))

        def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.get_submodule(name)(x)
            return found

        def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            unit = wide * (wide.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt()
            return self.get_parameter(name) * unit.to(x.dtype)

        def _logits(self, own: torch.Tensor) -> torch.Tensor:
            if offsets is None:
                return own
            tokens = torch.arange(len(offsets)) + offsets.long()
            whole = own.new_full((len(own), shape.vocab_size), float("-inf"))
            whole[:, tokens.to(own.device)] = own
            return whole

    return Eagle().eval()
