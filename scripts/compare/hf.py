"""llmctl and Hugging Face transformers: same checkpoints, same requests, same machine, one run.

    llmctl dataset --tokenizer examples/demo-target --output data.jsonl text \\
        --input-file examples/heldout.txt --num-requests 4 --input-len-dist 128,0 \\
        --output-len-dist 64,0
    python -m scripts.compare.hf examples/demo-target --draft examples/demo-draft \\
        --dataset data.jsonl

Requests run one at a time, greedily: `generate`, ours, `generate(assistant_model=...)`, ours with
the draft engine. Systems alternate in each round and ratios are taken within a round. Engines are
built for the run; the backend is the one that `llmctl build` picks here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from scripts.bench.rows import format_row
from scripts.compare import peers


def measure(arguments: argparse.Namespace, folder: Path) -> peers.Measured:
    """All systems in turns. Exits when our draft changes our output."""
    tasks = peers.read_tasks(arguments.dataset, arguments.num_requests)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    engine, draft_engine = peers.build_pair(
        arguments.target, arguments.draft, arguments.draft_len, folder, "--dtype", arguments.dtype
    )
    model = peers.load_transformers(arguments.target, dtype, device)
    systems = {"transformers": peers.transformers_system(model)}
    plain_engines = peers.open_engines(engine, None, 0)
    with plain_engines.executor() as plain:
        systems["llmctl"] = peers.one_by_one(plain)
        if draft_engine is None:
            return peers.take_turns(systems, tasks, arguments.rounds)
        assistant = peers.load_transformers(arguments.draft, dtype, device)
        assisted = peers.transformers_system(model, assistant_model=assistant)
        systems["transformers+assistant"] = assisted
        paired = peers.open_engines(engine, draft_engine, arguments.draft_len)
        with paired.executor() as drafted:
            systems["llmctl+draft"] = peers.one_by_one(drafted)
            measured = peers.take_turns(systems, tasks, arguments.rounds)
    if measured.outputs["llmctl"] != measured.outputs["llmctl+draft"]:
        sys.exit("error: the draft changed llmctl's output")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="Hugging Face folder")
    parser.add_argument("--draft", type=Path, help="Hugging Face folder of the draft model")
    parser.add_argument("--dataset", type=Path, required=True, help="requests, .jsonl")
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="rows as JSON lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(arguments, Path(folder))
    pairs = [("llmctl", "transformers")]
    if arguments.draft is not None:
        pairs += [("llmctl+draft", "transformers+assistant"), ("llmctl+draft", "llmctl")]
    rows = measured.rows(pairs)
    print("\n".join(map(format_row, rows)))
    names = ("llmctl", "torch", "transformers")
    facts = {
        "command": " ".join(["python -m scripts.compare.hf", *sys.argv[1:]]),
        "versions": {name: version(name) for name in names},
    }
    peers.write_json(arguments.output, rows, facts)


if __name__ == "__main__":
    main()
