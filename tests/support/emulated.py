"""Compiles what stands for a kernel on a CPU."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from llmctl.plugins.backends.cpu.compile import find_compiler
from llmctl.plugins.core.cache_home import cache_home
from llmctl.publish import write_cached

_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")


def compile_cpp(text: str, headers: Sequence[Path], options: Sequence[str] = ()) -> ctypes.CDLL:
    """A library of this C++. It is kept between runs, as kernels for a GPU are; headers: those that
    the text includes, which may change."""
    command = [*find_compiler(), *_FLAGS, *options]
    parts = (text, *(path.read_text() for path in headers), *command, _version())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept = cache_home() / "llmctl" / "emulated" / f"{key}.so"
    with tempfile.TemporaryDirectory() as folder:
        if not kept.exists():
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            command += [str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            write_cached(kept, library.read_bytes())
        return ctypes.CDLL(str(kept))


@cache
def _version() -> str:
    command = [*find_compiler(), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
