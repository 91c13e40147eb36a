"""The demo target with its draft heads, and without drafts, on the CPU backend: part of cpu.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from scripts.compare import peers
from scripts.demo.corpus import read_sample
from scripts.demo.evaluation import function_prompts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128, 128
BUILDS = {
    "redrafter": ("--redrafter-num-beams", "4", "--redrafter-draft-len-per-beam", "4"),
    "eagle": ("--max-draft-len", "5"),
}
# A row's name, its head, and what drafts: `--redrafter-num-beams auto`, that of 1 with
# `--draft-len 2`, and `--eagle-choices auto --draft-len 3`.
METHODS: tuple[tuple[str, str, DraftMethod], ...] = (
    ("redrafter", "redrafter", RecurrentDrafting()),
    ("redrafter-2", "redrafter", RecurrentDrafting(num_beams=1, draft_len=2)),
    ("eagle-3", "eagle", Eagle(3)),
)


def bench_heads(folder: Path, dtype: str, rounds: int) -> list[peers.Row]:
    """Plain decoding and each way to draft in turn; ratios are per round."""
    built = {"plain": _build(folder / f"{dtype}-plain", dtype)}
    for head, sizes in BUILDS.items():
        folder_of_head = EXAMPLES / f"demo-{head}"
        mode = ("--speculative-decoding-mode", head, "--draft-model-dir", folder_of_head, *sizes)
        built[head] = _build(folder / f"{dtype}-{head}", dtype, *mode)
    opened = {"llmctl": peers.open_engines(built["plain"], None, 0)}
    for name, head, method in METHODS:
        chosen = EngineOptions(built[head], method, enable_block_reuse=False)
        opened[f"llmctl+{name}"] = OpenEngines(check_engines(chosen))
    executors = {name: engines.executor() for name, engines in opened.items()}
    try:
        systems = {name: peers.one_by_one(executor) for name, executor in executors.items()}
        measured = peers.take_turns(systems, _tasks(), rounds)
        lengths = {
            name: executor.get_speculation_stats().acceptance_length
            for name, executor in executors.items()
        }
    finally:
        for executor in executors.values():
            executor.shutdown()
    outputs = measured.outputs
    assert all(outputs[name] == outputs["llmctl"] for name in systems), "a draft changed the output"
    drafting = [name for name in systems if name != "llmctl"]
    prefix = f"demo {dtype} heads "
    rows = measured.rows([(name, "llmctl") for name in drafting], prefix)
    for name in drafting:
        length = lengths[name]
        rows.append(peers.Row(f"{prefix}{name} tokens per round", length, "tokens", length, length))
    return rows


def _build(folder: Path, dtype: str, *options: object) -> Path:
    common = ("--backend", "cpu", "--dtype", dtype, "--max-batch-size", "4")
    engine, _ = peers.build_pair(EXAMPLES / "demo-target", None, 0, folder, *common, *options)
    return engine


def _tasks() -> list[peers.Task]:
    """Prompts that end within a function of the held-out text, as of examples/README.md."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    sample = read_sample(EXAMPLES / "heldout.txt")
    prompts = function_prompts(tokenizer, sample, PROMPT_TOKENS, NUM_PROMPTS)
    return [peers.Task([int(i) for i in np.asarray(prompt)], OUTPUT_TOKENS) for prompt in prompts]
