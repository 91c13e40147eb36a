"""Measured rows of a benchmark: printed and stored at once, merged with existing rows.

`<device>.jsonl` holds one JSON object a line (name, value, unit, minimum, maximum, share_of_limit,
note, command, versions, date, commit); `<device>.md` is the same as a Markdown table. A row that
is measured again replaces the older one, so a long table can be measured in several calls.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llmctl.builder.engine_format import BASE, Plan


@dataclass(frozen=True)
class Row:
    """One measured quantity over the rounds."""

    name: str
    value: float  # median
    unit: str
    minimum: float
    maximum: float
    share_of_limit: float | None = None
    note: str = ""


def row(
    name: str, unit: str, values: list[float], limit: float | None = None, note: str = ""
) -> Row:
    """`limit`: the best value that the measured read bandwidth allows, in the same unit, if any."""
    middle = median(values)
    share = None
    if limit:  # times have a floor, rates a ceiling
        share = limit / middle if unit.startswith("ms") else middle / limit
    return Row(name, middle, unit, min(values), max(values), share, note)


def format_row(item: Row) -> str:
    """One line of the printed table."""
    share = "" if item.share_of_limit is None else f"{item.share_of_limit:7.1%} of the limit"
    return (
        f"{item.name:34} {item.value:10.3f} {item.unit:8} "
        f"[{item.minimum:.3f} .. {item.maximum:.3f}] {share} {item.note}"
    )


def weight_bytes(plan: Plan, graph: str = BASE) -> int:
    """Bytes of weights that one run of a graph must read: all but the embedding's and the rotary
    tables'."""
    read = {name for op in plan.graphs[graph].ops for name in op.inputs.values()}
    return sum(
        math.prod(map(int, tensor.shape)) * getattr(torch, tensor.dtype).itemsize
        for tensor in plan.tensors
        if tensor.kind == "weight"
        and tensor.name in read
        and not tensor.name.startswith("model.embed_tokens")
        and "rotary" not in tensor.name
    )


def command_line() -> str:
    """How this program was started, without a path of this machine."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return " ".join(["python", *program, *sys.argv[1:]])


def provenance() -> dict[str, Any]:
    """What every stored row carries."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    import triton

    return {
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(),
        },
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
    }


MEANING = """\
Batch 1, FP8 weights and KV cache. Weights are planted, and every output is compared with the text
that they imply; `load` reads a real file.

- `read`: read bandwidth of the GPU's memory, by a kernel that only reads.
- `decode-M`: a step of model M without drafts, at 1,000 to 1,128 tokens of context. `-device` is
  its time on the GPU, `-host` how long the GPU waits for the host.
- `speed-M`: whole requests without drafts, 500 tokens in, 512 out, prefill included.
- `prefill-M-2048`: a prompt of 2,048 tokens.
- `pair-T+D`: whole requests of target T with draft D, 500 in, 1,024 out, prefill included; 10
  drafts per round, each right with probability 0.873. Of a round: `-acceptance-length` are its
  tokens, `-draft-step`, `-verify`, `-host` a step of the draft, the verification, and how long the
  GPU waits for the host. `-verify-growth` is how much longer a verification takes than a step of
  one token, `-first-token` the time to the first token.
- `load-M`: rate at which weights reach the GPU: over the link alone, from disk, from page cache.
- `open-M`: from starting a process to the first token, and its phases.

`head8`, `head4`: the draft's output head has 8 or 4 bits. `mxfp4`: 4-bit weights. `kN`: N drafts.
`p916`, `p880`: drafts are right with probability 0.916 or 0.880. Share of limit: for steps, the
bytes that must be read divided by the read bandwidth measured in the same run; for prompts, the FP8
peak; for loading, the bandwidth of the link to the GPU."""


class Table:
    """Rows of one device, kept in a folder (None: only printed)."""

    def __init__(self, folder: Path | None, kernels: str | None = None) -> None:
        """kernels: what compiled those of the engines, which may have been another machine's."""
        self._common = provenance()
        if kernels is not None:
            self._common["versions"]["kernels"] = kernels
        self._folder = folder
        device = self._common["versions"]["device"]
        self._stem = "h200" if "H200" in device else "h100" if "H100" in device else "gpu"
        self._rows: dict[str, dict[str, Any]] = {}
        stored = None if folder is None else folder / f"{self._stem}.jsonl"
        if stored is not None and stored.exists():
            rows = map(json.loads, stored.read_text().splitlines())
            self._rows = {item["name"]: item for item in rows}

    def add(self, *rows: Row) -> None:
        """Print rows, and store them before anything else is measured."""
        for item in rows:
            print(format_row(item), flush=True)
            self._rows[item.name] = asdict(item) | self._common
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(item) + "\n" for item in self._rows.values()]
            replace(self._folder / f"{self._stem}.jsonl", "".join(lines))
            replace(self._folder / f"{self._stem}.md", markdown(list(self._rows.values())))


def replace(path: Path, text: str) -> None:
    """Write a file whole: whoever is killed meanwhile leaves the old one."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.write_text(text)
    scratch.replace(path)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people; commands, versions and commits that rows share are named once."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for item in rows:
        versions = ", ".join(f"{name} {value}" for name, value in item["versions"].items())
        key = (item["command"], versions, item["date"], item["commit"])
        runs.setdefault(key, []).append(item["name"])
    text = [f"# CUDA backend, {rows[0]['versions']['device']}\n"]
    for number, (command, versions, date, commit) in enumerate(runs, 1):
        text.append(f"{number}. `{command}` · {versions} · {date} · commit {commit}")
    text += [
        f"\n{MEANING}\n",
        "| what | unit | median | minimum | maximum | share of limit | run | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    numbers = {name: n for n, names in enumerate(runs.values(), 1) for name in names}
    for item in rows:
        share = "" if item["share_of_limit"] is None else f"{item['share_of_limit']:.1%}"
        values = " | ".join(f"{item[key]:.4g}" for key in ("value", "minimum", "maximum"))
        run, note = numbers[item["name"]], item["note"]
        text.append(f"| {item['name']} | {item['unit']} | {values} | {share} | {run} | {note} |")
    return "\n".join(text) + "\n"
