"""The tiny target with heads that know some of its texts: drafts are accepted and rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.engine import Engine, open_cpu_engine
from scripts.demo.eagle_head import EagleShape
from support import eagle, medusa, redrafter
from support.tiny_pair import MAX_SEQ_LEN, VOCAB, save_target

WIDTH, PROMPT_LEN = 32, 6
SHARPNESS = 4.0  # of logits: a model that is sure of its tokens is one that heads can learn
METHODS: dict[str, DraftMethod] = {
    "medusa": Medusa(), "redrafter": RecurrentDrafting(None, 4), "eagle": Eagle(),
}  # fmt: skip
LIMITS: dict[str, dict[str, Any]] = {
    "medusa": {"max_draft_len": 15},
    "redrafter": {"redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 4},
    "eagle": {"max_draft_len": 4, "eagle_layers": "0,1"},
}


def build_with_heads(folder: Path, mode: str) -> Engine:
    """An engine of that speculative_decoding_mode; two layers, for EAGLE's head reads between."""
    save_target(folder / "hf", WIDTH, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    model.lm_head.weight.data *= SHARPNESS
    model.save_pretrained(folder / "hf")
    save_head(folder / "head", mode, model)
    request = BuildRequest(
        max_batch_size=8,
        max_num_tokens=192,
        max_seq_len=MAX_SEQ_LEN,
        tokens_per_block=16,
        speculative_decoding_mode=mode,
        draft_model_dir=str(folder / "head"),
        **LIMITS[mode],
    )
    run_build(plan_build(folder / "hf", request, backend="cpu"), folder / "engine")
    return open_cpu_engine(folder / "engine")


def save_head(folder: Path, mode: str, model: Any) -> None:
    """A head fitted to texts that the model writes."""
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, VOCAB, (16, PROMPT_LEN), generator=generator)
    texts = model.generate(prompts, max_new_tokens=64, do_sample=True, top_k=20, pad_token_id=0)
    if mode == "medusa":
        medusa.save_heads(folder, medusa.fit_heads(model, texts.flatten().tolist(), 3, VOCAB, 70))
    elif mode == "redrafter":
        redrafter.save_head(folder, redrafter.fit_head(model, texts.tolist(), VOCAB))
    else:
        parts = [(ids[:PROMPT_LEN], ids[PROMPT_LEN:]) for ids in texts.tolist()]
        shape = EagleShape(WIDTH, 2 * WIDTH, 2, 1, (0, 1))
        eagle.fit_head(model, parts, shape).write(folder, "tiny")
