"""The source text that a kernel binary depends on, found without compiling it.

The same text gives the same list in every process, so that a process finds what another one has
compiled and cached.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from inspect import getclosurevars
from pathlib import Path
from typing import Any

from llmctl.errors import KernelCompileError, MissingPackage

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


# ---- Triton ----


@cache
def triton_compiler() -> Any:
    """The `triton` package with its compiler. Raises MissingPackage where it is missing."""
    try:
        triton = import_module("triton")
        import_module("triton.compiler")
        import_module("triton.backends.compiler")
    except ImportError as error:
        raise MissingPackage(
            f"Triton, which compiles CUDA kernels, cannot be imported: {error}",
            fix='pip install "triton>=3.6,<3.7"',
        ) from error
    return triton


def triton_version() -> str:
    """The version of the compiler of Triton's kernels. Raises MissingPackage."""
    return str(triton_compiler().__version__)


def load_function(source: str) -> Any:
    """The Triton function that a KernelSpec's source names, as module:function."""
    triton_compiler()
    module, _, function = source.partition(":")
    return getattr(import_module(module), function)


def triton_sources(function: Any) -> list[str]:
    """A Triton function's text, that of every function it calls, directly or through others, and
    the constants that they read, in order of first mention.

    Triton's own `cache_key` does not serve: it leaves out what constants a called function reads
    unless that function was asked for its key before, so it differs from process to process.
    """
    triton = triton_compiler()
    functions, texts = [function], []
    for current in functions:  # grows while it is walked
        texts.append(current.src)
        used = getclosurevars(current.fn)
        for name, value in sorted({**used.globals, **used.nonlocals}.items()):
            if isinstance(value, triton.language.constexpr):
                texts.append(f"{name} = {value.value!r}")
            elif isinstance(value, triton.runtime.jit.JITCallable):
                texts.append(f"{name}: {value.__module__}:{value.__qualname__}")
                if not any(value is known for known in functions):
                    functions.append(value)
    return texts


# ---- CUDA C++ ----


def included_files(path: Path, root: Path) -> list[Path]:
    """A CUDA source and every file below `root` that it includes, in order of first mention."""
    found = [path]
    for current in found:  # grows while it is walked
        for name in _INCLUDE.findall(current.read_text()):
            candidates = [base / name for base in (current.parent, path.parent, root)]
            existing = [candidate.resolve() for candidate in candidates if candidate.is_file()]
            if not existing:
                raise KernelCompileError(f'{current}: #include "{name}" is not below {root.name}/')
            if existing[0] not in found:
                found.append(existing[0])
    return found
