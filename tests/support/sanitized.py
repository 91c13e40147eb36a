"""Runs engines with a CPU library that checks every access, in a process of its own.

python -m support.sanitized LIBRARY TINY TARGET DRAFT: prints what each run came to, as JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmctl.plugins.backends.cpu import binding
from llmctl.plugins.backends.cpu.compile import compile_library, find_compiler, source_hash
from llmctl.plugins.core.cache_home import cache_home

# -Og: half as long to compile as -O1, and the runs take no longer. -g1: the lines of a report; the
# names of variables would take as long again to compile.
FLAGS = ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NUM_EDITS = 60  # edited plans of each engine
VALUES = (0, -1, 1, 2, 2**31, -(2**63), "rows", "tokens", "float32", None, [2], 0.5)


def sanitized_library() -> Path:
    """The library with AddressSanitizer and UBSan, compiled once for each state of the sources."""
    folder = cache_home() / "llmctl" / "sanitized"
    path = folder / f"libllmctl_cpu.{source_hash()}.so"
    if not path.exists():
        compile_library(path, FLAGS)
    return path


def runtime_library() -> str:
    """AddressSanitizer's own, which must be in a process before everything else."""
    command = [*find_compiler(), "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_pair(target: Path, draft: Path) -> list[list[int]]:
    """Texts of the pair, with and without its draft."""
    import llmctl

    texts = []
    for options in ({"draft": draft}, {}):
        with llmctl.open(target, **options, max_tokens=2048) as executor:
            texts.append(list(executor.generate([5, 9, 200, 31] * 9, max_tokens=8)))
    return texts


def run_edited(tiny: Path) -> Iterator[tuple[str, Any]]:
    """(what it is, its text or how it was refused) of the engines in a folder, and of edits."""
    from llmctl.errors import LlmctlError
    from support.hostile_engine import KINDS, HostileEngine, write_text
    from support.json_edits import ACTIONS, apply

    for kind in KINDS:
        yield kind, write_text(tiny / kind)
        engine, rng = HostileEngine.read(tiny / kind), random.Random(kind)
        with tempfile.TemporaryDirectory() as folder:
            for number in range(NUM_EDITS):
                changed = engine.copy()
                edit = (rng.choice(ACTIONS), rng.randrange(1 << 20), rng.randrange(1 << 20))
                apply(changed.plan, (*edit, rng.choice(VALUES)))
                try:
                    text: Any = write_text(changed.write(Path(folder) / "edited"))
                except LlmctlError as error:
                    text = error.name
                yield f"{kind} {number} {edit}", text


def main() -> None:
    """See above."""
    library, tiny, target, draft = map(Path, sys.argv[1:])
    binding.LIBRARY_PATH = library
    found: dict[str, Any] = {"pair": run_pair(target, draft)}
    found |= dict(run_edited(tiny))
    binding.set_num_threads(2)
    assert binding.instruction_sets() == ["generic"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
