#!/usr/bin/env python3
"""Train draft heads for the demo target, on one CPU core in a quarter of an hour.

    python -m scripts.demo.train_heads medusa --output examples/demo-medusa
    python -m scripts.demo.train_heads redrafter --output examples/demo-redrafter

The target stays as it is. Heads learn what it chooses, from text of the demo corpus and text that
it continues itself. Writes the heads and metrics.json below --output; --smoke runs every step with
toy sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.batches import TokenStream, encode_stream
from scripts.demo.corpus import read_corpus, read_sample
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import HeadRows, corpus_rows, read_rows, written_rows
from scripts.demo.head_training import measure, train_heads
from scripts.demo.heads import DraftHeads, MedusaHeads, RecurrentHead
from scripts.demo.model import Llama, read_model
from scripts.demo.train import stage
from scripts.demo.training import Schedule

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = 1


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How the heads are made, amounts of text and the schedule."""

    make: Callable[[Tensor], DraftHeads]  # of the target's embedding, its output projection too
    read: Callable[[Path, Tensor], DraftHeads]
    corpus_rows: int
    greedy_rows: int
    sampled_rows: int  # at temperature 0.8
    schedule: Schedule
    length: int = 224  # tokens in a row
    prompt_length: int = 96
    num_prompts: int = 64  # for measuring, of PROMPT_LENGTH tokens
    batch: int = 1024  # positions in a step

    def smoke(self) -> HeadRecipe:
        """Toy sizes."""
        sizes = {"corpus_rows": 4, "greedy_rows": 4, "sampled_rows": 2, "num_prompts": 2}
        schedule = Schedule(num_steps=10, learning_rate=4e-3, warmup_steps=2, weight_decay=0.0)
        return replace(self, schedule=schedule, length=24, prompt_length=12, batch=16, **sizes)


RECIPES = {
    "medusa": HeadRecipe(
        make=lambda embedding: MedusaHeads(3, 2, embedding.shape[1], embedding),
        read=MedusaHeads.read,
        corpus_rows=1024,
        greedy_rows=1024,
        sampled_rows=256,
        schedule=Schedule(num_steps=400, learning_rate=3e-3, warmup_steps=30, weight_decay=0.0),
    ),
    "redrafter": HeadRecipe(
        make=lambda embedding: RecurrentHead(4, 128, embedding),
        read=lambda folder, embedding: RecurrentHead.read(folder, 4, embedding),
        corpus_rows=1024,
        greedy_rows=1024,
        sampled_rows=0,
        schedule=Schedule(num_steps=600, learning_rate=3e-3, warmup_steps=30, weight_decay=0.0),
    ),
}
PROMPT_LENGTH, HELD_OUT_LENGTH = 128, 256


def main() -> None:
    arguments = read_arguments()
    recipe = RECIPES[arguments.heads]
    recipe = recipe.smoke() if arguments.smoke else recipe
    torch.set_num_threads(arguments.threads)
    target = read_model(arguments.target, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    with stage("text"):
        corpus = read_corpus(arguments.corpus)
        stream = encode_stream(tokenizer, (document.text for document in corpus.train))
        rows = training_rows(target, stream, recipe)
    with stage("held-out text"):
        prompts = function_prompts(
            tokenizer, read_sample(arguments.held_out), PROMPT_LENGTH, recipe.num_prompts
        )
        held_out = read_rows(
            target, written_rows(target, torch.tensor(prompts), HELD_OUT_LENGTH, 0.0)
        )
    embedding = target.model.embed_tokens.weight.detach()
    torch.manual_seed(SEED)
    heads = recipe.make(embedding)
    with stage("training"):
        history = train_heads(
            heads,
            rows,
            recipe.schedule,
            recipe.batch,
            lambda: measure(heads, held_out, PROMPT_LENGTH - 1),
            SEED,
        )
        heads.write(arguments.output, arguments.target.name)
    with stage("evaluation"):
        stored = recipe.read(arguments.output, embedding)
        metrics = {
            "command": " ".join(["python", "-m", "scripts.demo.train_heads", *sys.argv[1:]]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in stored.parameters()),
            "training_positions": int(rows.depths(heads.num_depths)[0][1].sum()),
            "history": history,
            "held_out": asdict(measure(stored, held_out, PROMPT_LENGTH - 1)),
        }
        (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics["held_out"], indent=2))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train draft heads for the demo target.")
    parser.add_argument("heads", choices=RECIPES)
    parser.add_argument("--output", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--target", type=Path, default=EXAMPLES / "demo-target")
    parser.add_argument("--held-out", type=Path, default=EXAMPLES / "heldout.txt")
    parser.add_argument("--corpus", type=Path, help="as of scripts.demo.train")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, in seconds")
    return parser.parse_args()


def training_rows(target: Llama, stream: TokenStream, recipe: HeadRecipe) -> HeadRows:
    """Rows of the corpus, and rows that the target wrote after its prompts."""
    parts = []
    for index, (count, heat) in enumerate(((recipe.greedy_rows, 0.0), (recipe.sampled_rows, 0.8))):
        if not count:
            continue
        prompts = corpus_rows(stream, count, recipe.prompt_length, SEED + index)
        torch.manual_seed(SEED)
        parts.append(written_rows(target, prompts, recipe.length, heat))
    parts.append(corpus_rows(stream, recipe.corpus_rows, recipe.length, SEED + 2))
    print(f"{sum(map(len, parts))} rows of {recipe.length} tokens", flush=True)
    return HeadRows.joined([read_rows(target, part) for part in parts])


if __name__ == "__main__":
    main()
