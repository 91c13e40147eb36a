"""A target and a draft small enough that a step takes a tenth of a millisecond, on the cpu."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.runtime.engines.engine import Engine, open_cpu_engine

VOCAB = 131
MAX_SEQ_LEN = 640
DRAFT_LEN = 4


def build_pair(folder: Path, hidden_size: int = 32) -> tuple[Engine, Engine]:
    """(target, draft); the draft is the target with noise on its weights, so that about half of
    its tokens are accepted."""
    engines = []
    for role in ("target", "draft"):
        checkpoint, engine = folder / f"{role}-hf", folder / role
        _save(checkpoint, 0.0 if role == "target" else 0.2, hidden_size)
        request = BuildRequest(
            max_batch_size=8,
            max_num_tokens=128,
            max_seq_len=MAX_SEQ_LEN,
            max_draft_len=DRAFT_LEN if role == "target" else 0,
            tokens_per_block=16,
        )
        run_build(plan_build(checkpoint, request, backend="cpu"), engine)
        engines.append(open_cpu_engine(engine))
    return engines[0], engines[1]


def save_target(folder: Path, hidden_size: int = 32, num_layers: int = 1) -> None:
    """The target's checkpoint."""
    _save(folder, 0.0, hidden_size, num_layers)


def _save(folder: Path, noise: float, hidden_size: int, num_layers: int = 1) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_SEQ_LEN,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape))
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
