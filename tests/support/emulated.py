"""Compiles what stands for a kernel on a CPU."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from llmctl.plugins.backends.cpu.compile import find_compiler
from llmctl.plugins.core.cache_home import cache_home
from llmctl.publish import write_cached

_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")
_KEPT = cache_home() / "llmctl" / "emulated"


def compile_cpp(
    text: str,
    headers: Sequence[Path],
    macros: Mapping[str, object] | None = None,
    runtime: Sequence[Path] = (),
) -> ctypes.CDLL:
    """A library of this C++. It is kept between runs, as kernels for a GPU are.

    headers: what it begins with, and what that includes; compiled once, so they may not depend on
    the macros. runtime: C++ that is compiled once for all libraries, to run fast, and what it
    includes beside these.
    """
    text = "".join(f"#define {k} {v}\n" for k, v in (macros or {}).items()) + text
    linked = [str(_compiled_runtime(*runtime, *headers))] if runtime else []
    command = [*find_compiler(), *_FLAGS, "-Og", "-include", _compiled_header(*headers)]
    kept = _KEPT / f"{_key(text, *command, *linked)}.so"
    if not kept.exists():
        _compile(text, command, kept, linked)
    return ctypes.CDLL(str(kept))


@cache
def _compiled_header(first: Path, *others: Path) -> str:
    """Half of what compiling takes is reading headers. Where the compiler finds none that it has
    kept for its options, as with a macro that these mention, it reads them again."""
    command = [*find_compiler(), *_FLAGS, "-Og"]
    own = _KEPT / _key(*_texts(first, *others), *command, _version())
    compiled = own / f"{first.name}.gch"
    if not compiled.exists():
        for header in (first, *others):
            write_cached(own / header.name, header.read_bytes())
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.gch"
            command += ["-x", "c++-header", str(own / first.name), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            write_cached(compiled, made.read_bytes())
    return str(own / first.name)


@cache
def _compiled_runtime(source: Path, *included: Path) -> Path:
    command = [*find_compiler(), *_FLAGS, "-O3", f"-I{source.parent}"]
    kept = _KEPT / f"{_key(*_texts(source, *included), *command, _version())}.so"
    if not kept.exists():
        _compile(source.read_text(), command, kept)
    return kept


def _compile(text: str, command: Sequence[str], kept: Path, linked: Sequence[str] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        done = subprocess.run(
            [*command, str(source), *linked, "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[:4000]
        write_cached(kept, library.read_bytes())


def _texts(*paths: Path) -> list[str]:
    return [path.read_text() for path in paths]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _version() -> str:
    command = [*find_compiler(), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
