"""How long it takes from starting a process to an engine's first token, phase by phase, on a GPU.

    python -m scripts.bench.opening ENGINE --name 70b [--rounds 3] [--output docs/performance]
    python -m scripts.bench.opening GENERATED --name 70b --store DIR

Rows, in seconds over the rounds, each in a process of its own, with the engine's file in the page
cache:

  open-NAME             everything: from starting the process to the first token of a short prompt
  open-NAME-<phase>     a part of it; phases follow one another and add up to the whole

With --store an engine with generated weights is first written with stored ones to DIR. They are
numbers of ordinary size that mean nothing, so an engine larger than any checkpoint at hand can be
timed; its text is noise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_REST = "the rest of opening"
BLOCK_BYTES = 32 << 20
PROMPT_TOKENS = 32
# Functions whose time is a phase: its name, the module that calls it, what it is called there.
_TIMED = (
    ("read and check the plan", "llmctl.runtime.engines.open_cuda", "EngineFile.open"),
    ("begin with the weights", "llmctl.runtime.engines.engine_file", "Loading"),
    ("load the kernels", "llmctl.runtime.engines.engine_file", "CudaProgram"),
    ("wait for the weights", "llmctl.runtime.engines.loading", "Loading.finish"),
)


def write_stored(generated: Path, folder: Path) -> None:
    """The engine of `generated` with stored weights."""
    import numpy as np

    from llmctl.builder.container import encode_header, layout
    from llmctl.builder.engine_format import (
        engine_file,
        metadata_of,
        open_engine,
        plan_entries,
        read_engine_config,
    )
    from llmctl.publish import publish

    config = read_engine_config(generated)
    plan, stored = open_engine(generated)
    tensors = (
        replace(t, is_stored=t.kind != "weight" or t.name not in plan.rotary) for t in plan.tensors
    )
    plan = replace(plan, tensors=tuple(tensors))
    entries = layout(plan_entries(plan))
    header = encode_header(entries, metadata_of(plan))
    kernels = {kernel.tensor for kernel in plan.kernels}
    size = len(header) + sum(entry.num_bytes for entry in entries)
    with publish(folder) as scratch:
        path = scratch / engine_file(0)
        with path.open("w+b") as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as mapped:
                fill_ordinary(np.frombuffer(mapped, np.uint8))
                mapped[: len(header)] = header
                at = len(header)
                for entry in entries:
                    if entry.name in kernels:
                        mapped[at : at + entry.num_bytes] = stored[entry.name].numpy().tobytes()
                    at += entry.num_bytes
        if (generated / "tokenizer").is_dir():
            shutil.copytree(generated / "tokenizer", scratch / "tokenizer")
        files = {path.name: {"bytes": size, "header_sha256": sha256(header).hexdigest()}}
        whole = replace(config, files=files, weights={"load_format": "auto"})
        (scratch / "config.json").write_text(whole.to_json())


def fill_ordinary(room: NDArray[np.uint8]) -> None:
    """Bytes from 0x20 to 0x3f, at which numbers of every dtype are finite and below 1. By as many
    threads as there are cores: for 70 GB one takes half a minute."""
    import numpy as np

    block = np.random.default_rng(0).integers(0x20, 0x40, BLOCK_BYTES, np.uint8)

    def fill(at: int) -> None:
        part = room[at : at + BLOCK_BYTES]
        part[:] = block[: len(part)]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(room), BLOCK_BYTES)))


def time_opening(engine: Path, started: float) -> dict[str, Any]:
    """Seconds of each phase, in a process that has done nothing else. started: `time.time` when it
    was launched."""
    phases: dict[str, float] = {}
    last = started

    def mark(phase: str) -> None:
        nonlocal last
        now = time.time()
        phases[phase] = phases.get(phase, 0.0) + now - last
        last = now

    mark("Python")
    from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines

    mark("import llmctl")
    checked = check_engines(EngineOptions(engine))
    mark("check config.json, import torch")
    if checked.num_gpus:
        import torch

        torch.empty(1, device="cuda")
        mark("start CUDA")
    for _, module, _ in _TIMED:
        importlib.import_module(module)
    mark("import the rest")
    for phase, module, name in _TIMED:
        _mark_calls(phase, module, name, mark)
    lines: list[str] = []
    engines = OpenEngines(checked, lines.extend)
    mark(_REST)
    with engines.executor(owns_engines=True) as executor:
        mark("KV cache and graphs")
        next(executor.generate(list(range(5, 5 + PROMPT_TOKENS)), max_tokens=8))
        mark("first token")
    loads = [line for line in lines if line.startswith("loaded target")]
    return {"phases": phases, "load": "; ".join(loads)}


def _mark_calls(phase: str, module: str, name: str, mark: Callable[[str], None]) -> None:
    """Count what a function of a module takes as a phase, and what came before as the rest."""
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    called = getattr(holder, last)

    def timed(*arguments: Any, **named: Any) -> Any:
        mark(_REST)
        result = called(*arguments, **named)
        mark(phase)
        return result

    setattr(holder, last, timed)


def measure(engine: Path) -> dict[str, Any]:
    """One opening, in a new process."""
    command = [sys.executable, "-m", "scripts.bench.opening", str(engine), "--once"]
    done = subprocess.run(
        [*command, repr(time.time())], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def read_whole(path: Path) -> None:
    """Into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK_BYTES)
        while file.readinto(buffer):
            pass


def main() -> None:
    """Parse, measure, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--name", default="engine", help="of the engine, in the rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", type=Path, help="write the engine with stored weights there")
    parser.add_argument("--output", type=Path, help="folder for <device>.jsonl and <device>.md")
    parser.add_argument("--once", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once is not None:
        print(json.dumps(time_opening(arguments.engine, arguments.once)))
        return
    from scripts.bench.rows import Table, row

    engine = arguments.engine
    if arguments.store is not None:
        write_stored(engine, arguments.store)
        engine = arguments.store
    path = engine / "rank0.engine"
    if arguments.store is None:  # else it has just been written
        read_whole(path)
    found = [measure(engine) for _ in range(arguments.rounds)]
    table, prefix = Table(arguments.output), f"open-{arguments.name}"
    size = f"{path.stat().st_size / 1e9:.2f} GB"
    totals = [sum(each["phases"].values()) for each in found]
    table.add(row(prefix, "s", totals, note=f"{size}; {found[-1]['load']}"))
    for phase in found[0]["phases"]:
        times = [each["phases"][phase] for each in found]
        table.add(row(f"{prefix}-{phase.replace(' ', '-')}", "s", times))


if __name__ == "__main__":
    main()
