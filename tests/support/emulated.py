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
_KEPT = cache_home() / "llmctl" / "emulated"
# Of the C++ library: half of what compiling takes is reading them.
_STANDARD = """algorithm atomic chrono cmath cstdio cstdlib cstring deque functional memory mutex
random thread tuple utility vector"""


def compile_cpp(text: str, headers: Sequence[Path], options: Sequence[str] = ()) -> ctypes.CDLL:
    """A library of this C++. It is kept between runs, as kernels for a GPU are; headers: those that
    the text includes, which may change."""
    command = [*find_compiler(), *_FLAGS, *options]
    parts = (text, *(path.read_text() for path in headers), *command, _version())
    kept = _KEPT / f"{_key(*parts)}.so"
    with tempfile.TemporaryDirectory() as folder:
        if not kept.exists():
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            command += [*_standard_headers(), str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            write_cached(kept, library.read_bytes())
        return ctypes.CDLL(str(kept))


@cache
def _standard_headers() -> tuple[str, ...]:
    """Options that include the standard headers as the compiler has kept them; with other options
    it reads them again."""
    text = "#pragma once\n" + "".join(f"#include <{name}>\n" for name in _STANDARD.split())
    command = [*find_compiler(), *_FLAGS]
    header = _KEPT / f"{_key(text, *command, _version())}.h"
    compiled = header.with_name(f"{header.name}.gch")
    if not compiled.exists():
        write_cached(header, text.encode())
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "standard.gch"
            command += ["-x", "c++-header", str(header), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            write_cached(compiled, made.read_bytes())
    return "-include", str(header)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _version() -> str:
    command = [*find_compiler(), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
