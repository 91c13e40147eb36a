"""An EAGLE head as a torch module: its steps behind each position of a text, along the text.

What it computes is in builder/heads/eagle/network.py. Paths in the module are the names of the
head's tensors, but for its output matrix: ModelOpt leaves out what is called lm_head or output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = "vocabulary"  # path of the output matrix
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Which of its forms a head has. version: 1 (and 2) or 3. tensors: shapes by name, as
    builder/heads/eagle/shapes.py lists them, of weights [outputs, inputs] and norms. windows: of
    each layer's attention, in tokens, 0: full. rotary: (first position, last) -> the table of RoPE
    [positions, head_size], half of it cosines and half sines (builder/rope.py)."""

    version: int
    num_taps: int
    tensors: Mapping[str, tuple[int, ...]]
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    vocab_size: int  # of the target
    windows: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    num_steps: int
    rotary: Callable[[int, int], torch.Tensor]

    def linears(self) -> dict[str, str]:
        """Paths in the module -> names of their modules."""
        return {
            VOCABULARY if name == "lm_head" else name: name
            for name, lengths in self._weights()
            if len(lengths) == 2 and name != EMBEDDING
        }

    def kept(self) -> dict[str, tuple[int, ...]]:
        """Paths of parameters that stay as they are -> their shapes; each is the weight of what its
        path names."""
        of_linears = self.linears()
        return {
            name: lengths for name, lengths in self._weights() if name not in of_linears.values()
        }

    def _weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, lengths in self.tensors.items():
            if name.endswith(".weight"):
                yield name.removesuffix(".weight"), lengths


def make_eagle(
    shape: EagleShape,
    projection: torch.Tensor,
    embedding: torch.Tensor,
    offsets: torch.Tensor | None,
) -> Any:
    """A HeadModule without weights of its own, which attends: `hidden` are features side by side.

    Step s of place i reads token i + 1 + s and what step s - 1 put out there, sees the pairs up to
    i and its own of the steps since, and says what follows. projection, embedding: the target's;
    offsets: d2t, where the vocabulary is reduced.
    """
    import torch
    from torch import nn
    from torch.nn.functional import embedding as embed
    from torch.nn.functional import linear, silu

    size, groups = shape.head_size, shape.num_heads // shape.num_kv_heads

    def rotate(x: torch.Tensor, first: int) -> torch.Tensor:
        """x [heads, positions, size], from a position on."""
        table = shape.rotary(first, first + x.shape[1]).to(x)
        cos, sin = table.chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Seen:
        """Keys and values of a layer: those of step 0 at all places, and of each step since."""

        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []

    class Eagle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for path, module in shape.linears().items():
                outputs, inputs = shape.tensors[f"{module}.weight"]
                has_bias = f"{module}.bias" in shape.tensors
                holder, name = self._holder(path)
                holder.add_module(name, nn.Linear(inputs, outputs, bias=has_bias, device="meta"))
            for path, lengths in shape.kept().items():
                holder, name = self._holder(path)
                empty = torch.empty(lengths, device="meta")
                holder.register_parameter(name, nn.Parameter(empty, requires_grad=False))

        def _holder(self, path: str) -> tuple[nn.Module, str]:
            found: nn.Module = self
            *outer, name = path.split(".")
            for part in outer:
                if part not in dict(found.named_children()):
                    found.add_module(part, nn.Module())
                found = found.get_submodule(part)
            return found, name

        def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
            g = self._feature(hidden)
            seen = [Seen() for _ in shape.windows]
            kept = shape.kept()
            table = self.get_parameter(EMBEDDING) if EMBEDDING in kept else embedding
            for step in range(shape.num_steps):
                x, residual = self._begin(embed(tokens[:, step], table), g)
                for layer in range(len(shape.windows)):
                    if layer:
                        x, residual = self._norm(f"layers.{layer}.input_layernorm", g), g
                    g = self._layer(layer, x, residual, step, seen[layer])
                if shape.version == 1:
                    yield linear(g, projection)
                    continue
                normal = self._norm("norm", g)
                g = normal if shape.norm_output else g
                yield self._logits(self._product(VOCABULARY, normal))

        def _feature(self, hidden: torch.Tensor) -> torch.Tensor:
            if shape.version == 1:
                return hidden
            if shape.norm_before_fc:
                hidden = self._norm("input_norm", hidden)
            if shape.fc_norm:
                parts = enumerate(hidden.chunk(shape.num_taps, -1))
                hidden = torch.cat([self._norm(f"fc_norm.{tap}", part) for tap, part in parts], -1)
            return self._product("fc", hidden)

        def _begin(self, e: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """What the first layer's attention reads, and what is added to what it puts out."""
            if shape.version == 1:
                u = self._product("fc", torch.cat((e, g), -1))
                return u, u
            normal = self._norm("layers.0.hidden_norm", g)
            x = torch.cat((self._norm("layers.0.input_layernorm", e), normal), -1)
            return x, normal if shape.norm_before_residual else g

        def _layer(
            self, layer: int, x: torch.Tensor, residual: torch.Tensor, step: int, seen: Seen
        ) -> torch.Tensor:
            g = residual + self._attend(layer, x, step, seen)
            x = self._norm(f"layers.{layer}.post_attention_layernorm", g)
            gate, up = (self._product(f"layers.{layer}.mlp.{p}_proj", x) for p in ("gate", "up"))
            return g + self._product(f"layers.{layer}.mlp.down_proj", silu(gate) * up)

        def _attend(self, layer: int, x: torch.Tensor, step: int, seen: Seen) -> torch.Tensor:
            count, prefix = len(x), f"layers.{layer}.self_attn"
            q, k, v = (
                self._product(f"{prefix}.{part}_proj", x).view(count, -1, size).transpose(0, 1)
                for part in "qkv"
            )
            if f"{prefix}.q_norm.weight" in shape.tensors:
                q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
            q, k = rotate(q, step), rotate(k, step).repeat_interleave(groups, 0)
            seen.keys.append(k)
            seen.values.append(v.repeat_interleave(groups, 0))
            window = shape.windows[layer] or count + step + 1
            square = torch.ones((count, count), dtype=torch.bool, device=x.device)
            outside = square.triu(1) | square.tril(step - window)
            shared = (q @ seen.keys[0].transpose(-1, -2)).masked_fill(outside, float("-inf"))
            since = [since for since in range(1, step + 1) if step - since < window]
            own = [(q * seen.keys[s]).sum(-1, keepdim=True) for s in since]
            weights = torch.softmax(torch.cat((shared, *own), -1).float() / size**0.5, -1).to(x)
            found = weights[..., :count] @ seen.values[0]
            for number, s in enumerate(since):
                found = found + weights[..., count + number, None] * seen.values[s]
            return self._product(f"{prefix}.o_proj", found.transpose(0, 1).reshape(count, -1))

        def _product(self, path: str, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.get_submodule(path)(x)
            return found

        def _norm(self, path: str, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            unit = wide * (wide.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt()
            return self.get_parameter(path) * unit.to(x.dtype)

        def _logits(self, own: torch.Tensor) -> torch.Tensor:
            if offsets is None:
                return own
            tokens = torch.arange(len(offsets)) + offsets.long()
            whole = own.new_full((len(own), shape.vocab_size), float("-inf"))
            whole[:, tokens.to(own.device)] = own
            return whole

    return Eagle().eval()
