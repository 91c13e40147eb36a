#!/usr/bin/env python3
"""Measure a Hugging Face folder on held-out text: perplexity and, with --draft, acceptance.

    python -m scripts.demo.evaluate --target examples/demo-target --draft examples/demo-draft

The protocol is that of the model card (`demo/evaluation.py`), on examples/heldout.txt, through
transformers in FP32 arithmetic, or, for a folder that `llmctl build` wrote, through the engine as
it is. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from scripts.demo.corpus import read_sample
from scripts.demo.engine import engine_logits
from scripts.demo.evaluation import (
    Logits,
    agreement,
    function_prompts,
    greedy_acceptance,
    perplexity,
    windows,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=EXAMPLES / "demo-target")
    parser.add_argument("--draft", type=Path, help="also measure this draft's greedy acceptance")
    parser.add_argument("--text", type=Path, default=EXAMPLES / "heldout.txt")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128, help="generated per prompt")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target/tokenizer.json"))
    documents = read_sample(arguments.text)
    target = read_logits(arguments.target, device)
    result: dict[str, object] = {"target": perplexity(target, tokenizer, documents, device)}
    if arguments.draft:
        draft = read_logits(arguments.draft, device)
        result["draft"] = perplexity(draft, tokenizer, documents, device)
        rows, _ = windows(tokenizer, documents)
        result["argmax_agreement"] = agreement(target, draft, rows, device)
        prompts = function_prompts(tokenizer, documents, 128, arguments.num_prompts)
        if not prompts:
            raise SystemExit(f"{arguments.text} has no function to cut a 128-token prompt from")
        result["acceptance"] = greedy_acceptance(
            target, draft, prompts, device, arguments.draft_len, arguments.num_tokens
        ).to_json()
    print(json.dumps(result, indent=2))


def read_logits(folder: Path, device: torch.device) -> Logits:
    """An engine, or a Hugging Face checkpoint computed in FP32, as ids -> logits."""
    if (folder / "rank0.engine").exists():
        engine = engine_logits(folder)
        return lambda ids: engine(ids.cpu()).to(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.Module.to(model, device)  # loaded models are in eval mode

    def logits(ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return out

    return logits


if __name__ == "__main__":
    main()
