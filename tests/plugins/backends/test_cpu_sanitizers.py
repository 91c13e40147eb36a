"""The CPU kernels read and write nothing outside their tensors, and no value of theirs overflows:
AddressSanitizer and UBSan watch the demo pair, tiny engines, and edited ones that are accepted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.hostile_engine import KINDS, build_tiny, write_text
from support.sanitized import NUM_EDITS, run_pair, runtime_library, sanitized_library

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest

pytestmark = pytest.mark.skipif(
    not Path(runtime_library()).is_absolute(), reason="the C++ compiler has no AddressSanitizer"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Path]:
    """Engines: tiny ones in a folder, and the demo pair."""
    folder = tmp_path_factory.mktemp("engines")
    for kind in KINDS:
        build_tiny(folder, kind)
    for role, draft_len in (("target", 3), ("draft", 0)):
        request = BuildRequest(
            max_batch_size=2, max_seq_len=96, max_num_tokens=64, max_draft_len=draft_len
        )
        checkpoint = repository / "examples" / f"demo-{role}"
        run_build(plan_build(checkpoint, request, backend="cpu"), folder / role)
    return {"tiny": folder, "target": folder / "target", "draft": folder / "draft"}


@pytest.fixture(scope="module")
def watched(folders: dict[str, Path], repository: Path) -> dict[str, Any]:
    """What each engine came to in a process with both sanitizers; that it ended well."""
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime_library(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python keeps what it has
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(repository / "tests"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "support.sanitized", sanitized_library(), *folders.values()]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runtime error" not in done.stderr, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_demo_pair_runs_under_sanitizers(
    watched: dict[str, Any], folders: dict[str, Path]
) -> None:
    with_draft, plain = watched["pair"]
    assert with_draft == plain and len(plain) == 8
    assert len(set(map(tuple, run_pair(folders["target"], folders["draft"])))) == 1


def test_edited_engines_are_refused_or_write_their_text_under_sanitizers(
    watched: dict[str, Any], folders: dict[str, Path]
) -> None:
    texts = {kind: write_text(folders["tiny"] / kind) for kind in KINDS}
    assert {kind: watched[kind] for kind in KINDS} == texts
    edits = {name: found for name, found in watched.items() if " " in name}
    assert len(edits) == NUM_EDITS * len(KINDS)
    for name, found in edits.items():
        assert isinstance(found, str) or found == texts[name.split()[0]], name
    counted = Counter(isinstance(found, str) for found in edits.values())
    assert counted[True] > 50 and counted[False] > 5, "most are refused, some mean the same"


def test_the_sanitizers_see_an_access_outside_a_tensor(
    folders: dict[str, Path], repository: Path
) -> None:
    """The kernels' own asserts and the sanitizers are there: a call that no check has seen ends."""
    code = """
import ctypes, sys, torch
from pathlib import Path
from llmctl.plugins.backends.cpu import binding
binding.LIBRARY_PATH = Path(sys.argv[1])
library = binding.load_kernels()
values = (ctypes.c_float * 8)()
library.llmctl_argmax(values, 64, 1 << 20, (ctypes.c_int32 * 64)())
"""
    environment = {**os.environ, "LD_PRELOAD": runtime_library(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(sanitized_library())],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr, done.stderr[-2000:]
