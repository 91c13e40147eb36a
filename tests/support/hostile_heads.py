"""Heads of the tiny engines that are edited, and the text such an engine writes with its drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.assembly import assemble
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.request import Request, Sequence

# By mode, and for a second kind of its heads, with run's option.
METHODS: dict[str, tuple[DraftMethod, tuple[str, ...]]] = {
    "medusa": (Medusa(), ("--medusa-choices", "auto")),
    "redrafter": (RecurrentDrafting(None, 2), ("--redrafter-num-beams", "auto")),
    "eagle": (Eagle(), ("--eagle-choices", "auto")),
    "eagle-1": (Eagle(), ("--eagle-choices", "auto")),
}


def head_options(folder: Path, mode: str, width: int, vocab: int) -> dict[str, Any]:
    """Fields of a BuildRequest for a random head in `folder`."""
    from support import eagle, medusa, redrafter  # as build_tiny's
    from support.eagle_first import FirstHead

    fields: dict[str, Any] = {}
    if mode == "medusa":
        medusa.save_heads(folder, medusa.make_heads(2, 1, width, vocab))
        fields = {"medusa_choices": "[[0],[1],[0,0],[0,1],[1,0]]"}
    elif mode == "redrafter":
        head = redrafter.make_head(width, vocab, exit_dim=40, num_layers=1)
        redrafter.save_head(folder, head)
        fields = {"redrafter_num_beams": 2, "redrafter_draft_len_per_beam": 2}
    else:
        sizes = {"hidden_size": width, "intermediate_size": 48, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "vocab_size": vocab, "draft_vocab_size": 30}  # fmt: skip
        fields = {"max_draft_len": 3}
        if mode == "eagle-1":
            sizes |= {"draft_vocab_size": vocab, "num_hidden_layers": 2}
            tensors = FirstHead(True, **sizes).tensors()
        else:
            fields["eagle_layers"] = "0,1,1"
            tensors = eagle.make_head(target_hidden=width, **sizes)
        eagle.save_head(folder, tensors, **sizes)
    return {
        "speculative_decoding_mode": mode.partition("-")[0],
        "draft_model_dir": str(folder),
        **fields,
    }


def mode_of(engine: Engine) -> str:
    """The build mode that an engine's config.json states."""
    number = engine.config.build_config["speculative_decoding_mode"]
    return next(mode for mode, row in SPECULATIVE_MODES.items() if row.number == number)


def write_with_drafts(engine: Engine, prompt: Items[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, with drafts of the engine's own heads."""
    method = METHODS[mode_of(engine)][0]
    draft_len = method.check(engine.config, {"target": engine.config})
    drafter = method.make_drafter({"target": engine}, draft_len)
    blocks = -(-engine.max_seq_len // engine.tokens_per_block)
    config = ExecutorConfig(KvCacheConfig(blocks))
    parts = assemble(engine, drafter, config, CpuSampling(), None)
    length = len(prompt)
    sequence = Sequence(
        1, 1, Request(tuple(prompt), count), 0, list(prompt), length, length + count
    )
    parts.scheduler.add(sequence)
    while parts.scheduler.has_work:
        parts.loop.step()
    return sequence.tokens[length:]
