#!/usr/bin/env python3
"""Train Medusa heads for the demo target, on one CPU core in a quarter of an hour.

    python -m scripts.demo.train_heads --output examples/demo-medusa

The target stays as it is, and the heads share its output projection, so that they are small. They
learn what the target chooses, from text of the demo corpus and text that it continues itself.
Writes the heads and metrics.json below --output; --smoke runs every step with toy sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.demo.batches import TokenStream, encode_stream
from scripts.demo.corpus import read_corpus, read_sample
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import HeadRows, corpus_rows, read_rows, written_rows
from scripts.demo.head_training import measure, train_medusa
from scripts.demo.heads import MedusaHeads
from scripts.demo.model import Llama, read_model
from scripts.demo.train import stage
from scripts.demo.training import Schedule

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = 1


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """Sizes, amounts of text and the schedule."""

    num_heads: int
    num_layers: int
    length: int  # tokens in a row
    prompt_length: int
    corpus_rows: int
    greedy_rows: int
    sampled_rows: int  # at temperature 0.8
    num_prompts: int  # for measuring, of PROMPT_LENGTH tokens
    batch: int  # positions in a step
    schedule: Schedule


FULL = HeadRecipe(
    num_heads=3,
    num_layers=2,
    length=224,
    prompt_length=96,
    corpus_rows=1024,
    greedy_rows=1024,
    sampled_rows=256,
    num_prompts=64,
    batch=1024,
    schedule=Schedule(num_steps=400, learning_rate=3e-3, warmup_steps=30, weight_decay=0.0),
)
SMOKE = HeadRecipe(
    num_heads=2,
    num_layers=1,
    length=24,
    prompt_length=12,
    corpus_rows=4,
    greedy_rows=4,
    sampled_rows=2,
    num_prompts=2,
    batch=16,
    schedule=Schedule(num_steps=10, learning_rate=4e-3, warmup_steps=2, weight_decay=0.0),
)
PROMPT_LENGTH, HELD_OUT_LENGTH = 128, 256


def main() -> None:
    arguments = read_arguments()
    recipe = SMOKE if arguments.smoke else FULL
    torch.manual_seed(SEED)
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
    projection = target.model.embed_tokens.weight.detach()
    heads = MedusaHeads(recipe.num_heads, recipe.num_layers, target.shape.hidden_size)
    with stage("training"):
        history = train_medusa(
            heads,
            projection,
            rows,
            recipe.schedule,
            recipe.batch,
            lambda trained: measure(trained, projection, held_out, PROMPT_LENGTH - 1),
            SEED,
        )
        heads.write(arguments.output, arguments.target.name)
    with stage("evaluation"):
        stored = MedusaHeads.read(arguments.output)
        metrics = {
            "command": " ".join(["python", "-m", "scripts.demo.train_heads", *sys.argv[1:]]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in stored.parameters()),
            "training_positions": int(rows.depths(recipe.num_heads)[0][1].sum()),
            "history": history,
            "held_out": asdict(measure(stored, projection, held_out, PROMPT_LENGTH - 1)),
        }
        (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics["held_out"], indent=2))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train Medusa heads for the demo target.")
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
        prompts = corpus_rows(stream, count, recipe.prompt_length, SEED + index)
        torch.manual_seed(SEED)
        parts.append(written_rows(target, prompts, recipe.length, heat))
    parts.append(corpus_rows(stream, recipe.corpus_rows, recipe.length, SEED + 2))
    print(f"{sum(map(len, parts))} rows of {recipe.length} tokens", flush=True)
    return HeadRows.joined([read_rows(target, part) for part in parts])


if __name__ == "__main__":
    main()
