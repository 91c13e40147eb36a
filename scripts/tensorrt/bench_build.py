"""Build TensorRT-RTX plans of real shapes without weights and without a GPU: sizes, times, memory.

    python -m scripts.tensorrt.bench_build [8b 70b 70b-tp8 8b-whole ...] [--check]

Prints a table in Markdown; every row is a process of its own, so its peak memory is its own. Our
kernels, which belong to an engine in pieces, are not compiled here. The time is the processor's, so
that it says the same beside other work; the builder uses one core. --check fails where an engine in
pieces takes a minute or 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SECONDS, MAX_BYTES = 60, 4e9
LIMITS = {
    "max_batch_size": 64,
    "max_seq_len": 8192,
    "max_num_tokens": 2048,
    "max_draft_len": 10,
}
COLUMNS = ("engine", "plans", "size", "kernels", "work memory", "CPU time", "peak memory")


@dataclass(frozen=True, slots=True)
class Case:
    """One engine: a shape of scripts/models/planted_shapes.py, in FP8 with static scales."""

    name: str
    shape: str
    tp_size: int = 1
    is_whole: bool = False

    @property
    def title(self) -> str:
        """The first column."""
        rank = f", one rank of {self.tp_size}" if self.tp_size > 1 else ""
        form = "one plan, and one for trees" if self.is_whole else "pieces"
        return f"{self.shape.upper()}{rank}, {form}"


CASES = {
    case.name: case
    for case in (
        Case("1b", "1b"),
        Case("8b", "8b"),
        Case("70b", "70b"),
        Case("70b-tp8", "70b", tp_size=8),
        Case("8b-whole", "8b", is_whole=True),
        Case("70b-whole", "70b", is_whole=True),
        Case("70b-tp8-whole", "70b", tp_size=8, is_whole=True),
    )
}


def measure(case: Case) -> dict[str, Any]:
    """Build one case in this process."""
    from llmctl.builder.build import plan_build
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.planted import LoadFormat
    from llmctl.builder.tensorrt.engine import compile_pieces
    from llmctl.builder.tensorrt.package import open_package
    from llmctl.builder.tensorrt.report import kernels
    from scripts.models.make_planted_checkpoints import Recipe

    form = {"kv_cache_type": "continuous", "kv_cache_dtype": "none"} if case.is_whole else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, document in Recipe(case.shape).documents().items():
            (Path(folder) / name).write_text(json.dumps(document))
        start = time.process_time()
        engine = plan_build(
            Path(folder),
            BuildRequest(**LIMITS, **form, tp_size=case.tp_size),
            backend="tensorrt-rtx",
            compute_capability="8.9",
            load_format=LoadFormat("dummy"),
            with_binaries=False,
        )
    package = open_package("tensorrt-rtx")
    plugin_config = engine.config.plugin_config
    pieces, _ = compile_pieces(package, engine.pieces, engine.limits, plugin_config, ("8.9",))
    return {
        "seconds": time.process_time() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": package.version,
        "pieces": [
            {
                "name": piece.name,
                "num_bytes": piece.num_bytes,
                "kernels": [len(kernels(profile)) for profile in piece.profiles],
                "memory": [profile["activation_bytes"] for profile in piece.profiles],
            }
            for piece in pieces
        ],
    }


def row(case: Case, found: dict[str, Any]) -> str:
    """One line of the table."""
    pieces = found["pieces"]
    cells = (
        case.title,
        ", ".join(piece["name"] for piece in pieces),
        " + ".join(f"{piece['num_bytes'] / 1e6:.1f}" for piece in pieces) + " MB",
        " + ".join("/".join(map(str, piece["kernels"])) for piece in pieces),
        f"{max(max(piece['memory']) for piece in pieces) / 1e9:.2f} GB",
        f"{found['seconds']:.1f} s",
        f"{found['peak_bytes'] / 1e9:.2f} GB",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["8b", "70b", "70b-tp8"], metavar="CASE")
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(CASES[arguments.one])))
        return 0
    unknown = set(arguments.cases) - set(CASES)
    if unknown:
        parser.error(f"{sorted(unknown)[0]} is not one of {', '.join(CASES)}")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    is_over = False
    for name in arguments.cases:
        command = [sys.executable, "-m", "scripts.tensorrt.bench_build", "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(row(CASES[name], found), flush=True)
        if not CASES[name].is_whole:
            is_over |= found["seconds"] > MAX_SECONDS or found["peak_bytes"] > MAX_BYTES
    if arguments.check and is_over:
        print(f"a build in pieces took more than {MAX_SECONDS} s or {MAX_BYTES / 1e9:.0f} GB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
