#!/usr/bin/env python3
"""Train the demo pair of `examples/` on the Python standard library, with one command.

    python -m scripts.demo.train --output /tmp/demo
    python -m scripts.demo.train --output /tmp/demo --corpus python3.11-to-3.13.tar.xz

Steps: split the corpus by module path, learn the tokenizer, train the target, let it write text,
distil the draft from it on corpus and written text, measure. Writes demo-target/, demo-draft/,
heldout.txt and metrics.json below --output. The full recipe wants a GPU (six minutes on an H100);
--smoke runs every step with toy sizes on a CPU. Seeds are fixed; GPU kernels still differ in the
last bits from run to run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.demo.batches import TokenStream, encode_stream, epochs
from scripts.demo.corpus import Corpus, Document, read_corpus, write_sample
from scripts.demo.evaluation import (
    agreement,
    find_repeats,
    function_prompts,
    greedy_acceptance,
    losses,
    perplexity,
    windows,
)
from scripts.demo.generation import continue_corpus, generate
from scripts.demo.model import Llama, read_model, round_to_bfloat16, write_model
from scripts.demo.recipe import FULL, SMOKE, Recipe
from scripts.demo.tokenizer import train_tokenizer, write_tokenizer
from scripts.demo.training import Validate, distillation_loss, lm_loss, mix, train

SEED = 20261121
SAMPLE_BYTES = 150_000
"""Size of heldout.txt."""


def main() -> None:
    arguments = read_arguments()
    recipe = SMOKE if arguments.smoke else FULL
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu")
    output: Path = arguments.output
    targets, drafts = output / "demo-target", output / "demo-draft"
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("highest")  # for measuring; training runs in BF16
    metrics = describe_run(device)
    with stage("corpus"):
        corpus = read_corpus(arguments.corpus)
        metrics["corpus"] = describe_corpus(corpus)
        output.mkdir(parents=True, exist_ok=True)
        write_sample(corpus.held_out, output / "heldout.txt", SAMPLE_BYTES)
    with stage("tokenizer"):
        texts = (document.text for document in corpus.train)
        tokenizer = train_tokenizer(texts, recipe.target.vocab_size)
        stream = encode_stream(tokenizer, (document.text for document in corpus.train))
        print(f"{len(stream)} training tokens", flush=True)
        metrics["num_training_tokens"] = len(stream)
    validate = validation(tokenizer, corpus.held_out, recipe, device)
    with stage("target"):
        target = Llama(recipe.target, recipe.dropout).to(device)
        metrics["target_history"] = train_target(target, stream, recipe, validate)
        write_pair_member(target, tokenizer, targets)
    with stage("generation"):
        target = read_model(targets, device)
        generated = continue_corpus(
            target,
            stream,
            recipe.generated_batches,
            recipe.generated_rows,
            recipe.generated_length,
            SEED,
        )
    with stage("draft"):
        draft = Llama(recipe.draft).to(device)
        metrics["draft_history"] = distil(draft, target, stream, generated, recipe, validate)
        write_pair_member(draft, tokenizer, drafts)
    with stage("evaluation"):
        metrics |= measure(
            read_model(targets, device),
            read_model(drafts, device),
            tokenizer,
            corpus.held_out,
            recipe,
        )
        (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics, indent=2))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo target and draft models.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--corpus",
        type=Path,
        help="folder or .tar.xz of .py files; default: this Python's standard library",
    )
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, in seconds")
    return parser.parse_args()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print how long a step took."""
    started = time.perf_counter()
    print(f"== {name}", flush=True)
    yield
    print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)


def describe_run(device: torch.device) -> dict[str, object]:
    is_cuda = device.type == "cuda"
    return {
        "command": " ".join(["python", "-m", "scripts.demo.train", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def describe_corpus(corpus: Corpus) -> dict[str, object]:
    sizes = {
        "train": (len(corpus.train), sum(len(item.text.encode()) for item in corpus.train)),
        "held_out": (
            len(corpus.held_out),
            sum(len(item.text.encode()) for item in corpus.held_out),
        ),
    }
    for name, (num_documents, num_bytes) in sizes.items():
        print(f"{name}: {num_documents} documents, {num_bytes / 1e6:.1f} MB", flush=True)
    return {
        **{f"num_{name}_documents": num for name, (num, _) in sizes.items()},
        **{f"{name}_bytes": num for name, (_, num) in sizes.items()},
        "dropped_as_leaks": corpus.leaks,
    }


def validation(
    tokenizer: Tokenizer, documents: list[Document], recipe: Recipe, device: torch.device
) -> Validate:
    """A quick held-out loss to print while training: every n-th window, to cross all documents."""
    rows, _ = windows(tokenizer, documents, recipe.length // 2)
    rows = rows[:: max(1, len(rows) // recipe.validation_rows)]

    def validate(model: Llama) -> float:
        was_compiled, model.is_compiled = model.is_compiled, False
        model.eval()
        total, num_tokens = losses(model, rows, device)
        model.is_compiled = was_compiled
        return total / num_tokens

    return validate


def train_target(
    target: Llama, stream: TokenStream, recipe: Recipe, validate: Validate
) -> list[tuple[int, float]]:
    if target.model.norm.weight.is_cuda:
        target.compile_layers()
    batches = epochs(stream, recipe.length, recipe.batch, SEED)
    return train(target, batches, lm_loss(target), recipe.target_schedule, validate, label="target")


def distil(
    draft: Llama,
    target: Llama,
    stream: TokenStream,
    generated: TokenStream,
    recipe: Recipe,
    validate: Validate,
) -> list[tuple[int, float]]:
    """Train the draft on the target's distribution; generated batches have as many tokens."""
    if draft.model.norm.weight.is_cuda:
        draft.compile_layers()
        target.compile_layers()
    generated_batch = max(1, recipe.batch * recipe.length // generated.shape[1])
    batches = mix(
        epochs(stream, recipe.length, recipe.batch, SEED + 1),
        generated,
        generated_batch,
        recipe.draft_corpus_steps,
        SEED,
    )
    loss_of = distillation_loss(draft, target)
    return train(draft, batches, loss_of, recipe.draft_schedule, validate, label="draft")


def write_pair_member(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    round_to_bfloat16(model)
    write_model(model, folder)
    write_tokenizer(tokenizer, folder, model.shape.max_position_embeddings)


def measure(
    target: Llama, draft: Llama, tokenizer: Tokenizer, documents: list[Document], recipe: Recipe
) -> dict[str, object]:
    """All numbers of the model card, over all held-out documents, in FP32 arithmetic."""
    device = target.model.norm.weight.device
    rows, _ = windows(tokenizer, documents)
    prompts = function_prompts(tokenizer, documents, recipe.prompt_length, recipe.num_prompts)
    result: dict[str, object] = {
        "target_parameters": target.num_parameters,
        "draft_parameters": draft.num_parameters,
        "target": perplexity(target, tokenizer, documents, device),
        "draft": perplexity(draft, tokenizer, documents, device),
        "argmax_agreement": agreement(target, draft, rows, device),
    }
    if not prompts:
        raise SystemExit(
            f"held-out documents have no function {recipe.prompt_length} tokens or more into a "
            "file to cut prompts from; give a larger --corpus"
        )
    result["acceptance"] = greedy_acceptance(
        target, draft, prompts, device, num_tokens=recipe.num_tokens
    ).to_json()
    # Greedy text of a small model ends in loops, which are easy to draft; its start is not.
    result["acceptance_at_start"] = greedy_acceptance(
        target, draft, prompts, device, num_tokens=recipe.num_tokens // 4
    ).to_json()
    ids = torch.tensor(prompts, device=device)
    with torch.no_grad():
        ids = torch.cat([ids, generate(target, ids, recipe.num_tokens, temperature=0.0)], dim=1)
    repeats = find_repeats(ids)[:, recipe.prompt_length :].float().mean().item()
    return {**result, "greedy_repeats": repeats}


if __name__ == "__main__":
    main()
