#!/usr/bin/env python3
"""Train draft heads for the demo target: on one GPU in four minutes, on a CPU less thoroughly.

    python -m scripts.demo.train_heads medusa --output examples/demo-medusa --device cuda
    python -m scripts.demo.train_heads redrafter --output examples/demo-redrafter --device cuda

The target stays as it is. Heads learn the distributions that it has, on text of the demo corpus and
text that it continues itself; nothing is fetched. Writes the heads and metrics.json below --output.
On a CPU there are fewer rows and steps; --smoke runs every step with toy sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.corpus import read_sample
from scripts.demo.encode import read_stream
from scripts.demo.evaluation import function_prompts
from scripts.demo.head_rows import read_rows, training_texts, written_rows
from scripts.demo.head_training import measure, train_heads
from scripts.demo.heads import DraftHeads, MedusaHeads, RecurrentHead
from scripts.demo.model import read_model
from scripts.demo.train import stage
from scripts.demo.training import Schedule

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = 1


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How the heads are made, amounts of text and the schedule: those of a GPU."""

    make: Callable[[Tensor], DraftHeads]  # of the target's embedding, its output projection too
    read: Callable[[Path, Tensor], DraftHeads]
    schedule: Schedule
    corpus_rows: int = 12288
    greedy_rows: int = 24576
    sampled_rows: int = 8192  # at temperature 0.8
    invented_rows: int = 98304
    length: int = 256  # tokens in a row
    prompt_length: int = 112
    rows_at_once: int = 8192  # that the target writes
    read_at_once: int = 256
    num_prompts: int = 64  # for measuring, of PROMPT_LENGTH tokens
    batch: int = 8192  # positions in a step

    def on_cpu(self) -> HeadRecipe:
        """A quarter of an hour on one core."""
        sizes = {"corpus_rows": 768, "greedy_rows": 512, "sampled_rows": 256}
        sizes["invented_rows"] = 1024
        schedule = replace(self.schedule, num_steps=700, learning_rate=3e-3, warmup_steps=30)
        return replace(
            self, schedule=schedule, length=224, rows_at_once=256, read_at_once=8, batch=1024,
            **sizes,
        )  # fmt: skip

    def smoke(self) -> HeadRecipe:
        """Toy sizes."""
        sizes = {"corpus_rows": 4, "greedy_rows": 4, "sampled_rows": 2, "num_prompts": 2}
        sizes["invented_rows"] = 4
        schedule = Schedule(num_steps=10, learning_rate=4e-3, warmup_steps=2, weight_decay=0.0)
        return replace(self, schedule=schedule, length=24, prompt_length=12, batch=16, **sizes)


DEPTHS = 4  # of the ReDrafter head
SCHEDULE = Schedule(num_steps=20000, learning_rate=3e-3, warmup_steps=300, weight_decay=0.0)


def _make_recurrent(embedding: Tensor, exit_dim: int = 128, num_layers: int = 3) -> DraftHeads:
    head = RecurrentHead(DEPTHS, exit_dim, embedding, num_layers)
    head.start_from(embedding)
    return head


RECIPES = {
    "medusa": HeadRecipe(
        make=lambda embedding: MedusaHeads(3, 2, embedding.shape[1], embedding),
        read=MedusaHeads.read,
        schedule=SCHEDULE,
    ),
    "redrafter": HeadRecipe(
        make=_make_recurrent,
        read=lambda folder, embedding: RecurrentHead.read(folder, DEPTHS, embedding),
        schedule=SCHEDULE,
    ),
}
PROMPT_LENGTH, HELD_OUT_LENGTH = 128, 256


def main() -> None:
    arguments = read_arguments()
    device = torch.device(arguments.device)
    recipe = RECIPES[arguments.heads]
    recipe = recipe if device.type == "cuda" else recipe.on_cpu()
    recipe = recipe.smoke() if arguments.smoke else recipe
    sizes = {"exit_dim": arguments.exit_dim, "num_layers": arguments.num_layers}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if arguments.heads == "redrafter":
        recipe = replace(recipe, make=partial(_make_recurrent, **sizes))
    elif sizes:
        raise SystemExit("--exit-dim and --num-layers are sizes of a ReDrafter head")
    torch.set_num_threads(arguments.threads)
    target = read_model(arguments.target, device)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    with stage("text"):
        stream = read_stream(tokenizer, arguments.corpus)
        texts = [text.to(device) for text in training_texts(target, stream, recipe, SEED)]
        rows = read_rows(target, torch.cat(texts), recipe.read_at_once)
    with stage("held-out text"):
        prompts = function_prompts(
            tokenizer, read_sample(arguments.held_out), PROMPT_LENGTH, recipe.num_prompts
        )
        written = written_rows(target, torch.tensor(prompts), HELD_OUT_LENGTH, 0.0)
        held_out = read_rows(target, written)
    embedding = target.model.embed_tokens.weight.detach()
    torch.manual_seed(SEED)
    heads = recipe.make(embedding).to(device)
    with stage("training"):
        history = train_heads(
            heads,
            rows,
            embedding,
            recipe.schedule,
            recipe.batch,
            lambda: measure(heads, held_out, PROMPT_LENGTH - 1),
            SEED,
        )
        heads.write(arguments.output, arguments.target.name)
    with stage("evaluation"):
        stored = recipe.read(arguments.output, embedding).to(device)
        metrics = {
            "command": " ".join(["python", "-m", "scripts.demo.train_heads", *sys.argv[1:]]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
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
    parser.add_argument("--corpus", type=Path, help="as of scripts.demo.train or .encode")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--exit-dim", type=int, help="width of a ReDrafter head (128)")
    parser.add_argument("--num-layers", type=int, help="of a ReDrafter head (3)")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
