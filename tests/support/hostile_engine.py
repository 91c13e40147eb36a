"""Engine directories that someone edited, with hashes made to fit; and what they write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import read_plan
from llmctl.errors import CorruptEngine
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.engine import open_cpu_engine
from support.hostile_heads import METHODS, head_options, mode_of, write_with_drafts

ENGINE = "rank0.engine"
VOCAB, LENGTH, BLOCK = 67, 48, 8
PROMPT = (3, 61, 7, 7, 22)
KINDS = ("fp8", "rows", "plain", *METHODS)


def build_tiny(folder: Path, kind: str) -> Path:
    """An engine of two layers that writes a token in a tenth of a millisecond.

    fp8: static scales, an FP8 cache and a draft length; rows: a scale a token; plain: bfloat16 with
    norms of query and key, a tied head and a window; others: bfloat16 with a head of that mode.
    """
    # Three seconds that whoever only runs an engine need not wait, and more under sanitizers.
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    from support.cuda_build import quantize

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"max_position_embeddings": LENGTH, "head_dim": 16}
    if kind == "plain":
        config: Any = Qwen3Config(
            **sizes, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9,
            max_window_layers=1,
        )  # fmt: skip
    else:
        config = LlamaConfig(**sizes)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.config.architectures = [type(model).__name__]
    checkpoint = folder / f"{kind}-hf"
    model.to(torch.bfloat16).save_pretrained(checkpoint)
    if kind in ("fp8", "rows"):
        quantize(checkpoint, is_static=kind == "fp8")
    drafts: dict[str, Any] = {"max_draft_len": 2} if kind == "fp8" else {}
    if kind in METHODS:
        drafts = head_options(folder / f"{kind}-head", kind, 32, VOCAB)
    request = BuildRequest(
        max_batch_size=2, max_num_tokens=24, max_seq_len=LENGTH, tokens_per_block=BLOCK, **drafts
    )
    run_build(plan_build(checkpoint, request, backend="cpu"), folder / kind)
    return folder / kind


def write_text(folder: Path, count: int = 5) -> list[int]:
    """Greedy tokens after PROMPT, by whatever opening the engine gives; with drafts, if it has
    heads."""
    engine = open_cpu_engine(folder)
    if mode_of(engine) in METHODS:
        return write_with_drafts(engine, PROMPT, count)
    engine.allocate_kv_cache(-(-LENGTH // BLOCK))
    tokens, text = list(PROMPT), []
    for _ in range(count):
        done = len(PROMPT) + len(text) - len(tokens)
        logits = engine.run(_step(tokens, done, engine.tokens_per_block))
        text.append(int(np.argmax(np.asarray(logits)[0])))
        tokens = text[-1:]
    return text


def _step(tokens: list[int], start: int, per_block: int) -> StepInputs:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    blocks = np.arange(-(-LENGTH // BLOCK), dtype=np.int32)[::-1].copy()
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        position_ids=positions,
        cu_q=np.array([0, len(tokens)], np.int32),
        kv_len=np.array([start + len(tokens)], np.int32),
        block_tables=blocks[None, :],
        slot_mapping=blocks[positions // per_block] * per_block + positions % per_block,
        logit_rows=np.array([len(tokens) - 1], np.int32),
    )


@dataclass
class HostileEngine:
    """An engine directory as JSON values and bytes, to be changed and written elsewhere."""

    config: dict[str, Any]
    header: dict[str, Any]  # the entries of the container, without its metadata
    metadata: dict[str, Any]
    plan: dict[str, Any]
    data: bytes

    @classmethod
    def read(cls, folder: Path) -> HostileEngine:
        """As `build` wrote it."""
        raw = (folder / ENGINE).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__")
        config = json.loads((folder / "config.json").read_text())
        return cls(config, header, metadata, json.loads(metadata["plan"]), raw[8 + length :])

    def copy(self) -> HostileEngine:
        """One that may be changed."""
        return deepcopy(self)

    def op(self, name: str) -> dict[str, Any]:
        """The operators whose name ends so."""
        return next(op for op in self.plan["ops"] if op["name"].endswith(name))

    def tensor(self, name: str) -> dict[str, Any]:
        """The plan's tensor."""
        return next(tensor for tensor in self.plan["tensors"] if tensor["name"] == name)

    def bytes(self) -> bytes:
        """The engine file."""
        metadata = {**self.metadata, "plan": json.dumps(self.plan)}
        text = json.dumps({"__metadata__": metadata, **self.header}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text + self.data

    def write(self, folder: Path, raw: bytes | None = None) -> Path:
        """The directory, its engine file `raw` or this one's; config.json describes it."""
        raw = self.bytes() if raw is None else raw
        write_directory(folder, self.config, raw)
        return folder


def write_directory(folder: Path, config: dict[str, Any], raw: bytes) -> None:
    """An engine directory whose config.json has the hash of `raw`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ENGINE).write_bytes(raw)
    length = int.from_bytes(raw[:8], "little")
    files = {ENGINE: {"bytes": len(raw), "header_sha256": sha256(raw[: 8 + length]).hexdigest()}}
    (folder / "config.json").write_text(json.dumps({**config, "files": files}))


Change = Callable[[HostileEngine], Any]
Edited = Callable[..., Path]


def refuse(folder: Path, match: str) -> None:
    """The directory is refused by whoever opens it, and whoever only reads the plan."""
    with pytest.raises(CorruptEngine, match=match) as refused:
        write_text(folder)
    assert refused.value.fix
    with pytest.raises(CorruptEngine, match=match):
        read_plan(folder)
