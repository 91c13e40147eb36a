"""Engines of several ranks for tests on GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from scripts.models.make_planted_checkpoints import Recipe
from scripts.models.make_planted_checkpoints import write_checkpoint as write_planted
from support.e2e import DRAFT_LEN, llmctl
from support.gpu import quantize
from support.tensorrt.checkpoints import write_checkpoint

# Of the demo target's sizes, but with heads for eight ranks; random weights.
WIDE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
# Sums over K divide into eight parts of whole blocks, and rows into those of the sum with the norm.
PARTED = {
    **WIDE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 128,
}
LIMITS = ("--max-batch-size", 16, "--max-seq-len", 1024)
TOGETHER = {"ranks_on_one_device": True}
ACCEPTANCE, SEED = 0.66, 5
# Heads that ranks share: how they draft, and options of their build.
SHARED_HEADS: dict[str, tuple[DraftMethod, tuple[object, ...]]] = {
    "medusa": (Medusa(draft_len=15), ()),
    "redrafter": (
        RecurrentDrafting(None, 3),
        ("--redrafter-num-beams", 3, "--redrafter-draft-len-per-beam", 3),
    ),
}


@dataclass
class RankEngines:
    """Checkpoints and engines by name, made on first use."""

    folder: Path
    examples: Path

    def build(self, name: str, checkpoint: Path, *options: object) -> Path:
        path = self.folder / name
        if not path.exists():
            llmctl("build", "--backend", "cuda", "--checkpoint-dir", checkpoint,
                   "--output-dir", path, *LIMITS, *options)  # fmt: skip
        return path

    def wide(self, form: str, ranks: int) -> Path:
        """The same random model for every number of ranks. It also drafts for itself."""
        checkpoint = self.folder / f"wide-{form}"
        if not checkpoint.exists():
            write_checkpoint(checkpoint, "llama", form, **WIDE)
        drafts = ("--max-draft-len", DRAFT_LEN)
        return self.build(f"wide-{form}-{ranks}", checkpoint, *drafts, "--tp-size", ranks)

    def parted(self, form: str, ranks: int) -> Path:
        """The same random model for every number of ranks, with the same text."""
        checkpoint = self.folder / f"parted-{form}"
        if not checkpoint.exists():
            write_checkpoint(checkpoint, "llama", form, **PARTED)
        options = ("--max-draft-len", DRAFT_LEN, "--tp-size", ranks, "--tp-invariant")
        return self.build(f"parted-{form}-{ranks}", checkpoint, *options)

    def demo(self, role: str) -> Path:
        """Of two ranks."""
        checkpoint = self.folder / f"demo-{role}"
        if not checkpoint.exists():
            quantize(self.examples / f"demo-{role}", checkpoint)
        drafts = ("--max-draft-len", DRAFT_LEN) if role == "target" else ()
        return self.build(f"demo-{role}-2", checkpoint, *drafts, "--tp-size", 2)

    def headed(self, mode: str, *options: object) -> Path:
        """The demo target of two ranks with its heads of a mode."""
        self.demo("target")  # makes the checkpoint
        heads = ("--draft-model-dir", self.examples / f"demo-{mode}", "--tp-size", 2, *options)
        name = f"demo-{mode}-2"
        return self.build(
            name, self.folder / "demo-target", "--speculative-decoding-mode", mode, *heads
        )

    def planted(self, role: str, ranks: int, quantization: str = "fp8") -> Path:
        checkpoint = self.folder / f"planted-{role}-{quantization}"
        if not checkpoint.exists():
            recipe = Recipe("tiny", role, ACCEPTANCE, SEED, quantization)
            write_planted(checkpoint, recipe, config_only=True)
            config = json.loads((checkpoint / "config.json").read_text())
            config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
            (checkpoint / "config.json").write_text(json.dumps(config))
        weights = ("--load-format", "planted", "--seed", SEED, "--planted-role", role)
        drafts = ("--max-draft-len", DRAFT_LEN) if role == "target" else ()
        options = (*weights, "--planted-acceptance", ACCEPTANCE, *drafts, "--tp-size", ranks)
        return self.build(f"planted-{role}-{quantization}-{ranks}", checkpoint, *options)
