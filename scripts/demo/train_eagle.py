#!/usr/bin/env python3
"""Train an EAGLE-3 head for the demo target, on one GPU in minutes or slowly on a CPU.

    python -m scripts.demo.train_eagle --output examples/demo-eagle --device cuda

The target stays as it is. The head learns what it chooses, from text of the demo corpus and text
that it continues itself, unrolled over its own outputs (eagle_training.py). Writes the head and
metrics.json below --output; --smoke runs every step with toy sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.corpus import read_sample
from scripts.demo.eagle_head import EagleHead, EagleShape
from scripts.demo.eagle_training import (
    EagleRows,
    likeliest_tokens,
    measure_eagle,
    read_features,
    train_eagle,
)
from scripts.demo.encode import read_stream
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import training_texts, written_rows
from scripts.demo.model import read_model
from scripts.demo.train import stage
from scripts.demo.train_heads import EXAMPLES, HELD_OUT_LENGTH, PROMPT_LENGTH, SEED
from scripts.demo.training import Schedule

TAPS = (2, 5, 7)
NUM_STEPS = 5  # that the head is unrolled over, and drafts of a chain that is measured


@dataclass(frozen=True, slots=True)
class EagleRecipe:
    """Amounts of text and the schedule."""

    corpus_rows: int
    greedy_rows: int
    sampled_rows: int  # at temperature 0.8
    schedule: Schedule
    batch: int  # rows in a step
    rows_at_once: int  # that the target writes
    length: int = 256  # tokens in a row
    prompt_length: int = 96
    invented_rows: int = 0
    num_prompts: int = 64  # for measuring, of PROMPT_LENGTH tokens

    def smoke(self) -> EagleRecipe:
        """Toy sizes."""
        sizes = {"corpus_rows": 4, "greedy_rows": 4, "sampled_rows": 2, "num_prompts": 2}
        schedule = Schedule(num_steps=10, learning_rate=1e-3, warmup_steps=2, weight_decay=0.0)
        return replace(self, schedule=schedule, length=24, prompt_length=12, batch=4, **sizes)


RECIPES = {
    "cpu": EagleRecipe(
        corpus_rows=1024,
        greedy_rows=1024,
        sampled_rows=0,
        schedule=Schedule(num_steps=400, learning_rate=2e-3, warmup_steps=30, weight_decay=0.0),
        batch=8,
        rows_at_once=256,
    ),
    "cuda": EagleRecipe(
        corpus_rows=8192,
        greedy_rows=10240,
        sampled_rows=2048,
        schedule=Schedule(num_steps=4000, learning_rate=2e-3, warmup_steps=150, weight_decay=0.01),
        batch=64,
        rows_at_once=2048,
    ),
}


def main() -> None:
    arguments = read_arguments()
    recipe = RECIPES[arguments.device]
    recipe = recipe.smoke() if arguments.smoke else recipe
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    target = read_model(arguments.target, device)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    with stage("text"):
        stream = read_stream(tokenizer, arguments.corpus)
        texts = training_texts(target, stream, recipe, SEED)
        rows = EagleRows.joined([read_features(target, each, TAPS) for each in texts])
    with stage("held-out text"):
        prompts = function_prompts(
            tokenizer, read_sample(arguments.held_out), PROMPT_LENGTH, recipe.num_prompts
        )
        written = written_rows(target, torch.tensor(prompts), HELD_OUT_LENGTH, 0.0)
        held_out = read_features(target, written, TAPS)
    embedding = target.model.embed_tokens.weight.detach()
    shape = EagleShape(embedding.shape[1], arguments.intermediate_size, 6, 1, TAPS)
    head = new_head(shape, arguments.draft_vocab, embedding, rows).to(device)
    with stage("training"):
        history = train_eagle(
            head,
            rows,
            embedding,
            recipe.schedule,
            recipe.batch,
            NUM_STEPS,
            lambda: measure_eagle(head, held_out, NUM_STEPS, PROMPT_LENGTH - 1),
            SEED,
        )
        head.write(arguments.output, arguments.target.name)
    with stage("evaluation"):
        stored = EagleHead.read(arguments.output, embedding).to(device)
        metrics = {
            "command": " ".join(["python", "-m", "scripts.demo.train_eagle", *sys.argv[1:]]),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in stored.parameters()),
            "training_tokens": rows.text.tokens.numel(),
            "vocabulary_share": vocabulary_share(stored.kept, held_out),
            "history": history,
            "held_out": asdict(measure_eagle(stored, held_out, NUM_STEPS, PROMPT_LENGTH - 1)),
        }
        (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics["held_out"], indent=2))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head for the demo target.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--device", choices=RECIPES, default="cpu", help="decides the amounts too")
    parser.add_argument("--target", type=Path, default=EXAMPLES / "demo-target")
    parser.add_argument("--held-out", type=Path, default=EXAMPLES / "heldout.txt")
    parser.add_argument("--corpus", type=Path, help="as of scripts.demo.train or .encode")
    parser.add_argument("--draft-vocab", type=int, default=1280, help="tokens that it drafts")
    parser.add_argument("--intermediate-size", type=int, default=384, help="of its MLP")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, in seconds")
    return parser.parse_args()


def new_head(shape: EagleShape, draft_vocab: int, embedding: Tensor, rows: EagleRows) -> EagleHead:
    """Its output matrix begins as the target's."""
    torch.manual_seed(SEED)
    kept = likeliest_tokens(rows.text, draft_vocab, len(embedding))
    head = EagleHead(shape, embedding, kept)
    with torch.no_grad():
        head.lm_head.weight.copy_(embedding[kept])
    return head


def vocabulary_share(kept: Tensor, rows: EagleRows) -> float:
    """How much of what the target chose on held-out text the head's vocabulary has."""
    return float(torch.isin(rows.text.chosen[:, PROMPT_LENGTH - 1 :], kept).float().mean())


if __name__ == "__main__":
    main()
