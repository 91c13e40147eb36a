"""Scripts where a package or a GPU is missing: help all the same, and a named error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BLOCK = """
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
"""


@pytest.fixture
def script(repository: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process that has neither triton nor a GPU."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"scripts.{name}", *map(str, words)]
        return subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("name", ["bench.attention", "compare.draft", "setup.bootstrap_pip"])
def test_help_needs_no_package_of_a_gpu(script, name):
    done = script(name, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout and not done.stderr


def test_what_a_script_lacks_is_named_with_what_to_install(script, tmp_path):
    done = script("bench.attention", "--compile", tmp_path / "binaries")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "error[MissingPackage]: Triton" in done.stderr and "fix: pip install" in done.stderr
    done = script("bench.best_ids")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "error[NoDevice]: this script needs a GPU" in done.stderr and "fix: " in done.stderr


def test_other_failures_keep_their_traceback(script):
    done = script("compare.draft", "/bin/false", "x", 1)
    assert done.returncode == 1
    done = script("compare.draft", "/no/such/program", "x", 1)
    assert done.returncode == 1 and "Traceback" in done.stderr
