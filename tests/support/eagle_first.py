"""Heads of EAGLE-1 and 2 in plain torch: transformers' own decoder layers, the first without
the norm before its attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from support.eagle import SIZES

_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
           "rms_norm_eps", "vocab_size")  # fmt: skip


class FirstHead(torch.nn.Module):
    """As EAGLE's code has it; `theta` is the head's own, `sizes` are fields of its config.json."""

    def __init__(self, bias: bool, theta: float = 10000.0, **sizes: Any) -> None:
        super().__init__()
        fields = {**SIZES, **sizes}
        config: Any = LlamaConfig(
            **{name: fields[name] for name in _FIELDS} | {"rope_theta": theta}
        )
        config._attn_implementation = "eager"
        torch.manual_seed(4)
        hidden = int(fields["hidden_size"])
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=bias)
        count = int(fields.get("num_hidden_layers", 1))
        layers: list[Any] = [LlamaDecoderLayer(config, index) for index in range(count)]
        for layer in layers:
            layer.input_layernorm.weight.data.uniform_(0.5, 1.5)
            layer.post_attention_layernorm.weight.data.uniform_(0.5, 1.5)
        layers[0].input_layernorm = torch.nn.Identity()
        self.layers = torch.nn.ModuleList(layers)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The next features [N, H] of features [N, H] and the tokens behind them, or [rows, N, H]
        of as many."""
        first = self.fc(torch.cat((embedded, features), -1))
        count = features.shape[-2]
        x, places = first.reshape(-1, *first.shape[-2:]), torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        for layer in self.layers:
            found = layer(x, attention_mask=mask, position_ids=places,
                          position_embeddings=self.rotary(x, places))  # fmt: skip
            x = found if isinstance(found, torch.Tensor) else found[0]
        return x.reshape(first.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under EAGLE's names."""
        return {n: t.detach().clone() for n, t in self.state_dict().items() if "rotary" not in n}


@torch.no_grad()
def fit_first_head(model: Any, texts: list[tuple[list[int], list[int]]], **sizes: Any) -> FirstHead:
    """A head that knows what comes behind some prompts: all is random but its last product, which
    is least squares over what it reads there: the target's features, and in their place what it
    would put out itself. `sizes` are those of the target."""
    table = model.get_input_embeddings().weight.detach().float()
    output = model.get_output_embeddings().weight.detach().float()
    head = FirstHead(True, **sizes)
    layers: list[Any] = list(head.layers)
    for layer in layers:
        layer.self_attn.o_proj.weight *= 0.2
    layer = layers[-1]
    read: list[torch.Tensor] = []
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
    layer.mlp.down_proj.weight.zero_()
    gram: Any = 0.0
    sums: Any = 0.0
    for prompt, text in texts:
        ids = torch.tensor([*prompt, *text])
        if len(ids) < 4 or len(text) < 2:
            continue
        wanted = 20 * torch.nn.functional.normalize(output[ids[2:]], dim=-1)
        states = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        own = torch.cat((states[:1], wanted[:-1]))
        for features in (states[: len(wanted)], own):
            read.clear()
            before = head(features, table[ids[1 : 1 + len(wanted)]])
            first = max(len(prompt) - 2, 0)
            inner = read[0][first:]
            gram = gram + inner.T @ inner
            sums = sums + inner.T @ (wanted - before)[first:]
    ridge = 1e-4 * gram.diagonal().mean() * torch.eye(len(gram))
    layer.mlp.down_proj.weight.copy_(torch.linalg.solve(gram + ridge, sums).T)
    return head
