"""EAGLE-3 heads made for tests, and what plain torch makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from scripts.demo.eagle_head import EagleHead, EagleShape

Tensors = dict[str, torch.Tensor]
LAYOUTS = ("eagle", "speculators")
HIDDEN, VOCAB = 64, 131  # of tiny targets
SIZES: dict[str, Any] = {  # of a head for one of these
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "draft_vocab_size": 50,
}
HEAD_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # (of the tensors, of config.json)
    "default": ({}, {}),
    "residual": ({}, {"norm_before_residual": True}),
    "theta": ({}, {"rope_theta": 50.0}),
    "embedding": ({"own_embedding": True, "hidden_size": 48},
                  {"hidden_size": 48, "target_hidden_size": 64}),
    "qwen3": ({"qk_norm": True, "head_dim": 24}, {"head_dim": 24}),
    "norm_before_fc": ({"input_norm": True}, {"norm_before_fc": True}),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}),
    "norm_output": ({}, {"norm_output": True}),
    "whole": ({"draft_vocab_size": 131}, {"draft_vocab_size": 131}),
}  # fmt: skip
DEMO_SHAPE = EagleShape(384, 512, 6, 2, (2, 4, 5))  # of a head for the demo target


def make_head(
    seed: int = 0, *, taps: int = 3, target_hidden: int = HIDDEN, own_embedding: bool = False,
    qk_norm: bool = False, input_norm: bool = False, fc_norm: bool = False, layers: int = 1,
    **sizes: Any,
) -> Tensors:  # fmt: skip
    """A random head under EAGLE's names (others for layers behind the first), in float32; `sizes`
    are fields of its config.json."""
    sizes = {**SIZES, **sizes}
    generator = torch.Generator().manual_seed(seed)
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    vocab, draft_vocab = sizes["vocab_size"], sizes["draft_vocab_size"]
    size = sizes.get("head_dim") or width // sizes["num_attention_heads"]
    heads, kv_heads = sizes["num_attention_heads"] * size, sizes["num_key_value_heads"] * size
    names = ["midlayer", *(f"layers.{layer}" for layer in range(1, layers))]
    shapes = {"fc": (width, taps * target_hidden)}
    for name in names:
        read = 2 * width if name == "midlayer" else width
        shapes |= {
            f"{name}.self_attn.q_proj": (heads, read),
            f"{name}.self_attn.k_proj": (kv_heads, read),
            f"{name}.self_attn.v_proj": (kv_heads, read),
            f"{name}.self_attn.o_proj": (width, heads),
            f"{name}.mlp.gate_proj": (inner, width),
            f"{name}.mlp.up_proj": (inner, width),
            f"{name}.mlp.down_proj": (width, inner),
        }
    shapes["lm_head"] = (draft_vocab, width)
    if own_embedding:
        shapes["embed_tokens"] = (vocab, width)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    wide = [*(f"midlayer.{norm}" for norm in norms), "norm"]
    wide += [f"{name}.{norm}" for name in names[1:] for norm in norms[1:]]
    for name in wide:
        tensors[f"{name}.weight"] = torch.rand(width, generator=generator) + 0.5
    if input_norm:
        tensors["input_norm.weight"] = torch.rand(taps * target_hidden, generator=generator) + 0.5
    for tap in range(taps if fc_norm else 0):
        tensors[f"fc_norm.{tap}.weight"] = torch.rand(target_hidden, generator=generator) + 0.5
    for name in names if qk_norm else ():
        for part in "qk":
            tensors[f"{name}.self_attn.{part}_norm.weight"] = (
                torch.rand(size, generator=generator) + 0.5
            )
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][kept] = True
    return tensors


def save_head(folder: Path, tensors: Tensors, layout: str = "eagle", **changes: Any) -> Path:
    """A folder in a layout; `changes` are fields of its config.json, None: absent."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = tensors
    fields = {**SIZES, **changes}
    config = {name: value for name, value in fields.items() if value is not None}
    if layout == "speculators":
        stored = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        outer = ("draft_vocab_size", "norm_before_residual", "target_hidden_size",
                 "eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "fc_norm",
                 "norm_before_fc", "norm_output")  # fmt: skip
        own = {name: config.pop(name) for name in outer if name in config}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **own}
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TorchHead:
    """The head of `tensors` (EAGLE's names) in plain torch, in float32 and without a cache."""

    def __init__(
        self,
        tensors: Tensors,
        embedding: torch.Tensor,
        *,
        theta: float = 10000.0,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        windows: Sequence[int] = (0,),
        **sizes: Any,
    ) -> None:
        """windows: of its layers' attention; 0: all tokens."""
        self.windows = windows
        self.sizes = {**SIZES, **sizes}
        self.tensors = {name: t.float() for name, t in tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.float())
        self.theta, self.norm_before_residual = theta, norm_before_residual
        self.norm_output = norm_output

    @classmethod
    def of_config(
        cls,
        tensors: Tensors,
        embedding: torch.Tensor,
        fields: Mapping[str, Any],
        windows: Sequence[int] = (0,),
    ) -> TorchHead:
        """What config.json says with these fields."""
        known = ("norm_before_residual", "norm_output", "hidden_size", "head_dim")
        said = {name: fields[name] for name in known if name in fields}
        theta = fields.get("rope_theta", 10000.0)
        return cls(tensors, embedding, theta=theta, windows=windows, **said)

    def fc(self, features: torch.Tensor) -> torch.Tensor:
        """g [N, H] of features [N, 3 target hidden]."""
        if "input_norm.weight" in self.tensors:
            features = self._norm("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(len([name for name in self.tensors if "fc_norm" in name]), -1)
            parts = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
            features = torch.cat(parts, -1)
        return linear(features, self.tensors["fc.weight"])

    def out(self, g: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """o [N, H] of the pairs 0 to N - 1."""
        x = self._norm("midlayer.input_layernorm", self.embedding[list(tokens)])
        normal = self._norm("midlayer.hidden_norm", g)
        x = self._attention("midlayer", torch.cat((x, normal), dim=-1), self.windows[0])
        x = self._mlp("midlayer", x + (normal if self.norm_before_residual else g))
        for layer, window in enumerate(self.windows[1:], 1):
            name = f"layers.{layer}"
            y = self._norm(f"{name}.input_layernorm", x)
            x = self._mlp(name, x + self._attention(name, y, window))
        return self._norm("norm", x) if self.norm_output else x

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[N, V] of o, minus infinity outside the reduced vocabulary."""
        normal = out if self.norm_output else self._norm("norm", out)
        own = linear(normal, self.tensors["lm_head.weight"])
        if "d2t" not in self.tensors:
            return own
        tokens = self.tensors["d2t"].long() + torch.arange(own.shape[1])
        whole = torch.full((len(own), self.sizes["vocab_size"]), float("-inf"))
        whole[:, tokens] = own
        return whole

    def chain(self, features: torch.Tensor, tokens: Sequence[int], length: int) -> list[int]:
        """The greedy drafts behind pairs of features [N, ...] and the tokens behind them [N]."""
        g, read, drafts = self.fc(features), list(tokens), list[int]()
        while True:
            out = self.out(g, read)[-1:]
            drafts.append(int(self.logits(out).argmax()))
            if len(drafts) == length:
                return drafts
            g, read = torch.cat((g, out)), [*read, drafts[-1]]

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        y = self._norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (self._linear(f"{layer}.mlp.{part}_proj", y) for part in ("gate", "up"))
        return x + self._linear(f"{layer}.mlp.down_proj", silu(gate) * up)

    def _attention(self, layer: str, x: torch.Tensor, window: int) -> torch.Tensor:
        count, heads = len(x), self.sizes["num_attention_heads"]
        groups = heads // self.sizes["num_key_value_heads"]
        q, k, v = (
            self._linear(f"{layer}.self_attn.{part}_proj", x)
            .view(count, -1, self._size)
            .transpose(0, 1)
            for part in "qkv"
        )
        if f"{layer}.self_attn.q_norm.weight" in self.tensors:
            q = self._norm(f"{layer}.self_attn.q_norm", q)
            k = self._norm(f"{layer}.self_attn.k_norm", k)
        q, k = self._rotate(q), self._rotate(k).repeat_interleave(groups, dim=0)
        v = v.repeat_interleave(groups, dim=0)
        scores = q @ k.transpose(1, 2) / self._size**0.5
        hidden = torch.ones(count, count).triu(1).bool()
        if window:
            hidden |= torch.ones(count, count).tril(-window).bool()
        seen = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        return self._linear(f"{layer}.self_attn.o_proj", seen.transpose(0, 1).reshape(count, -1))

    @property
    def _size(self) -> int:
        found = self.sizes.get("head_dim")
        return int(found or self.sizes["hidden_size"] // self.sizes["num_attention_heads"])

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self._size // 2
        speeds = self.theta ** (-torch.arange(half).float() / half)
        angles = torch.arange(x.shape[1])[:, None] * speeds
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        unit = x * (x.square().mean(-1, keepdim=True) + self.sizes["rms_norm_eps"]).rsqrt()
        return unit * self.tensors[f"{name}.weight"]


@torch.no_grad()
def fit_head(
    model: torch.nn.Module,
    texts: list[tuple[list[int], list[int]]],
    shape: EagleShape = DEMO_SHAPE,
    steps: int = 5,
) -> EagleHead:
    """A head that knows what comes behind some prompts: all is random but the output matrix, which
    is least squares over what it reads in the steps of rounds there, with the texts' own tokens."""
    table = model.get_input_embeddings().weight.detach().float()
    torch.manual_seed(3)
    kept = torch.tensor(sorted({token for _, text in texts for token in text}))
    head = EagleHead(shape, table, kept)
    rows = {token: row for row, token in enumerate(kept.tolist())}
    gram = 0.01 * torch.eye(shape.hidden_size)
    sums = torch.zeros(len(kept), shape.hidden_size)
    for prompt, text in texts:
        ids = [*prompt, *text]
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap] for tap in head.shape.taps], -1)
        count, following = len(ids) - 1, torch.tensor([[*ids[1:], *[0] * steps]])
        for step, out in enumerate(head.unroll(features[:, :count], following, steps)):
            first, last = len(prompt) - 1, len(ids) - 2 - step
            if first < last:
                x = head.norm(out[0, first:last])
                wanted = torch.tensor([rows[token] for token in ids[first + 2 + step :]])
                gram += x.T @ x
                sums.index_add_(0, wanted, x)
    # Least squares gives shares; a softmax of ten times these tells likely from unlikely.
    head.lm_head.weight.copy_(10 * torch.linalg.solve(gram, sums.T).T)
    return head
