"""A Llama in plain torch whose parameters carry Hugging Face's names, for training and sampling.

It computes what `transformers.LlamaForCausalLM` computes (a test compares the two) and adds what
training wants: dropout, per-layer compilation and a static KV cache for large-batch sampling.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID

RMS_NORM_EPS = 1e-5
ROPE_THETA = 10000.0

KVCache = list[tuple[Tensor, Tensor]]
"""Per layer: keys and values, each [batch, num_key_value_heads, max_length, head_dim]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes in config.json, by Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.is_grouped = shape.num_key_value_heads != shape.num_attention_heads
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotary: Tensor, cache: tuple[Tensor, Tensor] | None, start: int
    ) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            end = start + length
            cache[0][:, :, start:end] = k
            cache[1][:, :, start:end] = v
            k, v = cache[0][:, :, :end].to(q.dtype), cache[1][:, :, :end].to(q.dtype)
        # With a cache this serves a whole prompt (start 0) or one token; never a middle chunk.
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=length > 1, enable_gqa=self.is_grouped
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=RMS_NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=RMS_NORM_EPS)
        self.mlp = MLP(shape)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: tuple[Tensor, Tensor] | None = None,
        start: int = 0,
    ) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotary, cache, start)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training)


class Decoder(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=RMS_NORM_EPS)


class Llama(nn.Module):
    """Logits from token ids; input and output embeddings are tied."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.is_compiled = False
        self.model = Decoder(shape, dropout)
        self.register_buffer("rotary", rotary_table(shape), persistent=False)
        residual_std = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def compile_layers(self) -> None:
        """Compile one layer's code, which all layers share, for the shapes it will meet."""
        # Target and draft, training or not, rows of two lengths: more than the default limit of 8.
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.is_compiled = True

    def forward(self, ids: Tensor, cache: KVCache | None = None, start: int = 0) -> Tensor:
        """Logits [batch, length, vocab] of ids [batch, length] at positions from `start` on.

        With a cache, `start` is 0 for the prompt; later calls pass one token each.
        """
        x = self.states(ids, cache, start)
        if cache is not None:
            x = x[:, -1:]
        return F.linear(x, self.model.embed_tokens.weight)

    def states(self, ids: Tensor, cache: KVCache | None = None, start: int = 0) -> Tensor:
        """What the output projection reads, [batch, length, hidden]. Arguments as of `forward`."""
        rotary = self.get_buffer("rotary")[:, start : start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            if cache is None and self.is_compiled:
                x = layer(x, rotary)
            else:  # `.forward` goes round the compiled call: lengths vary here
                x = layer.forward(x, rotary, cache[index] if cache else None, start)
        states: Tensor = self.model.norm(x)
        return states

    def new_cache(self, batch: int, max_length: int, dtype: torch.dtype) -> KVCache:
        size = (batch, self.shape.num_key_value_heads, max_length, self.shape.head_dim)
        device = self.model.norm.weight.device
        return [
            (
                torch.empty(size, dtype=dtype, device=device),
                torch.empty(size, dtype=dtype, device=device),
            )
            for _ in self.model.layers
        ]


def rotary_table(shape: Shape) -> Tensor:
    """Cosines and sines [2, max_position_embeddings, head_dim], halves repeated."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / ROPE_THETA**exponents).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate x [batch, heads, length, head_dim]; the pairs are (i, i + head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * rotary[0] + turned * rotary[1]).to(x.dtype)


def round_to_bfloat16(model: Llama) -> None:
    """Give the weights, in place, the values that the saved checkpoint will have."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def write_model(model: Llama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (BF16)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file leaves 0600


def read_model(folder: Path, device: torch.device) -> Llama:
    """Read what `write_model` wrote, in FP32."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(Shape(**{name: config[name] for name in Shape.__slots__}))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).eval()
