"""llmctl and vLLM: same checkpoints, same requests, same machine, one run. Needs vLLM and a GPU
that both support.

    python -m scripts.compare.vllm TARGET --draft DRAFT --dataset data.jsonl --draft-len 10
    python -m scripts.compare.vllm TARGET --draft DRAFT --dataset data.jsonl --draft-len 10 \\
        --load-format dummy --synthetic-acceptance 6.1

Requests run greedily, one at a time and all at once, without and with the draft model. Each engine
of vLLM has the GPU to itself, then ours do: they do not alternate, ratios are of equal rounds.
With --load-format dummy folders need only config files, and both systems make random weights; then
drafts mean something only with --synthetic-acceptance, which both understand alike.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scripts.bench.rows import Row, format_row, provenance
from scripts.compare import peers

MODES = ("one at a time", "all at once")


def vllm_options(arguments: argparse.Namespace, max_len: int, has_draft: bool) -> dict[str, Any]:
    """What vLLM's LLM is given: nothing kept of earlier prompts, no tokenizer."""
    options: dict[str, Any] = {
        "model": str(arguments.target),
        "dtype": arguments.dtype,
        "load_format": arguments.load_format,
        "max_model_len": max_len,
        "max_num_seqs": arguments.max_batch_size,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if has_draft:
        speculative = {
            "method": "draft_model",
            "model": str(arguments.draft),
            "num_speculative_tokens": arguments.draft_len,
        }
        if arguments.synthetic_acceptance is not None:
            speculative |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": arguments.synthetic_acceptance,
            }
        options["speculative_config"] = speculative
    return options


def vllm_systems(llm: Any) -> dict[str, peers.System]:
    """The two ways of running a load."""
    from vllm import SamplingParams

    def generate(tasks: Sequence[peers.Task]) -> peers.Outputs:
        prompts = [{"prompt_token_ids": task.prompt} for task in tasks]
        params = [
            SamplingParams(
                temperature=0, max_tokens=task.num_tokens, ignore_eos=True, detokenize=False
            )
            for task in tasks
        ]
        found = llm.generate(prompts, params, use_tqdm=False)
        return [list(item.outputs[0].token_ids) for item in found]

    def one_at_a_time(tasks: Sequence[peers.Task]) -> peers.Outputs:
        return [generate([task])[0] for task in tasks]

    return {MODES[0]: one_at_a_time, MODES[1]: generate}


def measure_vllm(
    arguments: argparse.Namespace, tasks: Sequence[peers.Task], max_len: int, has_draft: bool
) -> peers.Measured:
    """One engine of vLLM, closed afterwards."""
    from vllm import LLM

    llm = LLM(**vllm_options(arguments, max_len, has_draft))
    try:
        return peers.take_turns(vllm_systems(llm), tasks, arguments.rounds)
    finally:  # it computes in a process of its own, which ends here and gives its memory back
        llm.llm_engine.engine_core.shutdown()


def measure_ours(
    arguments: argparse.Namespace, tasks: Sequence[peers.Task], engines: Any, has_draft: bool
) -> peers.Measured:
    """Our engines, with the draft or without."""
    acceptance = None
    if has_draft and arguments.synthetic_acceptance is not None:
        from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance

        length = arguments.synthetic_acceptance
        acceptance = SyntheticAcceptance.from_length(length, arguments.draft_len)
    with engines.executor(is_speculative=has_draft, acceptance=acceptance) as executor:
        systems = {MODES[0]: peers.one_by_one(executor), MODES[1]: peers.all_at_once(executor)}
        return peers.take_turns(systems, tasks, arguments.rounds)


def compare(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Rows of speeds and ratios."""
    tasks = peers.read_tasks(arguments.dataset, arguments.num_requests)
    max_len = max(len(task.prompt) + task.num_tokens for task in tasks) + arguments.draft_len + 1
    drafts = (False, True) if arguments.draft is not None else (False,)
    theirs = {draft: measure_vllm(arguments, tasks, max_len, draft) for draft in drafts}
    options = ["--dtype", arguments.dtype, "--max-seq-len", max_len]
    options += ["--max-batch-size", arguments.max_batch_size]
    options += ["--load-format", arguments.load_format]
    pair = (folder / "target", folder / "draft" if arguments.draft is not None else None)
    if not pair[0].exists():
        pair = peers.build_pair(
            arguments.target, arguments.draft, arguments.draft_len, folder, *options
        )
    engines = peers.open_engines(*pair, arguments.draft_len)
    ours = {draft: measure_ours(arguments, tasks, engines, draft) for draft in drafts}
    rows = []
    for draft in drafts:
        for mode in MODES:
            name = f"with draft, {mode}" if draft else mode
            both = peers.Measured(
                {"llmctl": ours[draft].speeds[mode], "vllm": theirs[draft].speeds[mode]},
                {"llmctl": ours[draft].outputs[mode], "vllm": theirs[draft].outputs[mode]},
            )
            rows += both.rows([("llmctl", "vllm")], f"{name}: ")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="checkpoint folder that both systems read")
    parser.add_argument("--draft", type=Path, help="checkpoint folder of the draft model")
    parser.add_argument("--dataset", type=Path, required=True, help="requests, .jsonl")
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--synthetic-acceptance", type=float, help="mean tokens per round")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="of vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engines", type=Path, help="folder of our engines; built there if it has none"
    )
    parser.add_argument("--output", type=Path, help="rows as JSON lines")
    arguments = parser.parse_args()
    try:
        versions = {name: version(name) for name in ("llmctl", "vllm", "torch")}
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed here; vLLM: pip install vllm")
    with tempfile.TemporaryDirectory() as scratch:
        rows = compare(arguments, arguments.engines or Path(scratch))
    if arguments.synthetic_acceptance is not None:
        print("SYNTHETIC ACCEPTANCE: drafts are accepted at random; texts are meaningless")
    print("\n".join(map(format_row, rows)))
    facts = provenance()
    facts["versions"] |= versions
    facts["synthetic_acceptance_length"] = arguments.synthetic_acceptance
    peers.write_json(arguments.output, rows, facts)


if __name__ == "__main__":
    main()
