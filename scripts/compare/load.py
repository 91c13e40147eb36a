"""llmctl and vLLM under load: the same requests to either system, one system per call.

    python -m scripts.compare.load vllm CHECKPOINT --output docs/performance
    python -m scripts.compare.load llmctl ENGINE --checkpoint CHECKPOINT --output docs/performance

Loads are CONCURRENCYxINPUTxOUTPUTxREQUESTS: so many requests of random tokens, at most CONCURRENCY
in flight. Lengths are fixed, or ranges: of 64x500-1500x500-1500x192 each request draws its own, so
that they end one by one and not in waves. "arrivals" is one more: 32 requests generate while 8
prompts of 8,192 tokens arrive; its times between tokens are those of the 32 from the first arrival
to the last first token. Greedy, streamed, no tokenizer. A warm-up of the same shapes comes before
each load.

With a CHECKPOINT of make_planted_checkpoints the load is equal: both systems have its weights, and
the text of each is compared with what they imply. vLLM's dummy FP8 weights are nearly all zeros.

OUTPUT/vllm_load.jsonl keeps a line for each load and system, OUTPUT/vllm_load.md is the table of
them all, with the ratio to the fastest vLLM: on an H200; vllm_load_h100 and vllm_load_gpu are those
of other cards. Repeated measurements replace older rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmctl.cli.bench import metrics
from llmctl.cli.bench.driver import Pace
from llmctl.cli.bench.records import Recording, RequestRecord
from llmctl.runtime.engines.planted_weights import next_tokens
from llmctl.runtime.request import Request
from scripts.bench.rows import provenance
from scripts.bench.rows import replace as replace_file
from scripts.compare.load_systems import Server, llmctl_server, vllm_arguments, vllm_server
from scripts.compare.loads import Load, parse_load

LOADS = "1x500x200x8,64x500x200x256,256x500x200x1024,64x1000x1000x192,256x1000x1000x512"
SHARES = ("p50", "p90", "p99")
MEANING = """\
Requests are greedy, streamed, without common prefixes, and sent as token ids; the client measures
the times. TTFT is the time to first token, from submission (in the load `arrivals`, of the long
prompts). ITL is the time between responses. Wrong texts are outputs in which any token differs from
what the planted weights imply; "not known" stands where vLLM ran with random weights. vLLM has its
server's defaults (compilation, CUDA graphs, its own tokens per step where none are given), without
prefix caching. The last column is the run's number in the list above."""
FIGURES = {"ttft_ms": "TTFT ms", "itl_ms": "ITL ms"}


# ---- measuring ----


def measure(server: Server, load: Load, planted: Mapping[str, object] | None) -> dict[str, Any]:
    """Figures of one load, after a warm-up; `planted` implies the text, where it is known. Exits
    when an output has another length than asked."""
    server.run(load.requests(load.warmup, 1), Pace(), Recording())
    recording = Recording()
    requests = load.requests(load.shapes, 2)
    server.run(requests, load.pace, recording)
    wrong = None if planted is None else wrong_texts(requests, recording, planted)
    return figures(load, recording) | {"wrong_texts": wrong}


def wrong_texts(
    requests: list[Request], recording: Recording, planted: Mapping[str, object]
) -> int:
    """Outputs that are not what planted weights imply."""
    follows = next_tokens(planted).tolist()
    count = 0
    for record in recording.requests:
        before = [requests[record.index].input_token_ids[-1], *record.output_ids]
        pairs = enumerate(zip(before, record.output_ids, strict=False))
        wrong = next(((place, token) for place, (b, token) in pairs if token != follows[b]), None)
        if wrong is not None:
            count += 1
            print(f"request {record.index}: token {wrong[0]} is {wrong[1]}, which is wrong")
    return count


def figures(load: Load, recording: Recording) -> dict[str, Any]:
    """Speed, first tokens and gaps. Exits when an output has another length than asked."""
    for record in recording.requests:
        if not record.is_done or len(record.output_ids) != record.asked_tokens:
            error = record.error or f"{len(record.output_ids)} of {record.asked_tokens} tokens"
            sys.exit(f"{load.name}: request {record.index}: {error}")
    if load.num_watched:
        return watched(
            recording.requests[: load.num_watched], recording.requests[load.num_watched :]
        )
    found = metrics.compute(recording, 1)
    streaming = found["streaming_metrics"]
    speed = found["performance"]["output_throughput_per_gpu_tok_s"]
    return {"tok_s_per_gpu": speed, **{name: streaming[name] for name in (*FIGURES, "tpot_ms")}}


def watched(short: list[RequestRecord], long: list[RequestRecord]) -> dict[str, Any]:
    """Speed and gaps of the short ones between the first long submission and the last long first
    token, and first tokens of the long ones."""
    begin = min(record.submit_s for record in long if record.submit_s is not None)
    end = max(record.arrivals[0].at_s for record in long)
    gaps, tokens = [], 0
    for record in short:
        for before, after in zip(record.arrivals, record.arrivals[1:], strict=False):
            if begin < after.at_s and before.at_s < end:
                gaps.append((after.at_s - before.at_s) * 1e3)
                tokens += after.num_tokens
        if (early := end - record.arrivals[-1].at_s) > 0:
            sys.exit(f"a short request ended {early:.2f} s before the last long prompt was read")
    return {
        "tok_s_per_gpu": tokens / (end - begin),
        "ttft_ms": metrics.percentiles(map(metrics.ttft_ms, long)),
        "itl_ms": metrics.percentiles(gaps),
    }


# ---- rows ----


def store(folder: Path | None, row: dict[str, Any]) -> None:
    """Print a row, and put it into the .jsonl and .md of its card."""
    print(json.dumps({key: row[key] for key in ("load", "system", "settings", "tok_s_per_gpu")}))
    print(*(line for line in table([row]).splitlines() if line.startswith("| ")), sep="\n")
    sys.stdout.flush()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(row["versions"]["device"])
    path = folder / f"{stem}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = ("load", "model", "system", "settings")
    rows = [old for old in rows if any(old[name] != row[name] for name in names)] + [row]
    replace_file(path, "".join(json.dumps(item) + "\n" for item in rows))
    replace_file(folder / f"{stem}.md", table(rows))


def _stem(device: str) -> str:
    """Of the files of a card's rows: on another card no row replaces them, and no ratio is of
    two."""
    card = next((name for name in ("H200", "H100") if name in device), "GPU")
    return "vllm_load" if card == "H200" else f"vllm_load_{card.lower()}"


def table(rows: list[dict[str, Any]]) -> str:
    """For people: loads in the order measured, systems beside each other."""
    runs: dict[tuple[str, ...], int] = {}
    for row in rows:
        runs.setdefault(_run(row), len(runs) + 1)
    text = [f"# llmctl and vLLM under load, one {rows[0]['versions']['device']}\n"]
    for run, number in runs.items():
        text.append(f"{number}. " + " · ".join((f"`{run[0]}`", *run[1:])))
    text.append(f"\n{MEANING}")
    columns = [f"{title} {share}" for title in FIGURES.values() for share in SHARES]
    heads = ["load", "system", "settings", "tok/s/GPU", "over vLLM", *columns]
    heads += ["wrong texts", "run"]
    text += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    loads = list(dict.fromkeys((row["model"], row["load"]) for row in rows))
    for model, load in loads:
        group = [row for row in rows if (row["model"], row["load"]) == (model, load)]
        peers = [row["tok_s_per_gpu"] for row in group if row["system"] == "vllm"]
        for row in group:
            ratio = f"{row['tok_s_per_gpu'] / max(peers):.2f}" if peers else ""
            cells = [f"{model}: {load}", row["system"], row["settings"]]
            cells += [f"{row['tok_s_per_gpu']:,.0f}", ratio]
            cells += [f"{row[name][share]:.4g}" for name in FIGURES for share in SHARES]
            wrong = row.get("wrong_texts")
            cells += ["not known" if wrong is None else str(wrong), str(runs[_run(row)])]
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _run(row: dict[str, Any]) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
    return row["command"], versions, row["date"], f"commit {row['commit']}"


def open_server(arguments: argparse.Namespace, loads: list[Load]) -> AbstractContextManager[Server]:
    """The system asked for."""
    if arguments.system == "llmctl":
        return llmctl_server(
            arguments.model,
            arguments.max_num_tokens,
            arguments.max_step_ms,
            not arguments.whole_prompts,
        )
    try:
        version("vllm")
    except PackageNotFoundError:
        sys.exit("vllm is not installed here: pip install vllm")
    if arguments.max_step_ms is not None or arguments.whole_prompts:
        sys.exit("--max-step-ms and --whole-prompts are llmctl's; give vLLM --max-num-tokens")
    return vllm_server(
        vllm_arguments(
            arguments.model,
            arguments.load_format,
            arguments.max_seq_len or max(load.longest for load in loads),
            arguments.max_batch_size,
            arguments.max_num_tokens,
        )
    )


def planted_in(arguments: argparse.Namespace) -> Mapping[str, object] | None:
    """What implies the text of the checkpoint, if it is a planted one."""
    is_read = arguments.system == "vllm" and arguments.load_format == "auto"
    path = (arguments.checkpoint or arguments.model) / "config.json"
    is_known = (is_read or arguments.checkpoint is not None) and path.exists()
    return json.loads(path.read_text()).get("planted") if is_known else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=["llmctl", "vllm"])
    parser.add_argument(
        "model", type=Path, help="llmctl: engine directory; vllm: checkpoint folder"
    )
    parser.add_argument("--checkpoint", type=Path, help="that the engine was built from")
    parser.add_argument("--name", default="8B FP8", help="of the model, in the table")
    parser.add_argument("--loads", default=LOADS, help=f"with commas; default: {LOADS}")
    parser.add_argument("--max-num-tokens", type=int, help="tokens per step; default: each its own")
    parser.add_argument("--max-step-ms", type=float, help="llmctl: a step's time instead")
    parser.add_argument("--whole-prompts", action="store_true", help="llmctl: no chunks")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"], help="vLLM's")
    parser.add_argument("--max-batch-size", type=int, default=256, help="vLLM's")
    parser.add_argument("--max-seq-len", type=int, help="vLLM's; default: what the loads need")
    parser.add_argument("--output", type=Path, help="folder of the rows and their table")
    arguments = parser.parse_args()
    loads = [parse_load(text) for text in arguments.loads.split(",")]
    planted, num_wrong = planted_in(arguments), 0
    facts = {"model": arguments.name, "system": arguments.system}
    with open_server(arguments, loads) as server:
        origin = provenance()
        origin["versions"][arguments.system] = version(arguments.system)
        for load in loads:
            found = measure(server, load, server.planted or planted)
            num_wrong += found["wrong_texts"] or 0
            store(
                arguments.output,
                {"load": load.name, **facts, "settings": server.settings, **found, **origin},
            )
    if num_wrong:
        sys.exit(f"{num_wrong} texts are wrong")


if __name__ == "__main__":
    main()
