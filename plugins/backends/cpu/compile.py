"""Compiles the CPU kernels; `python -m llmctl.plugins.backends.cpu.compile` does it in place.

The library needs a C++17 compiler and nothing else: no Python headers, no torch. Each
instruction-set variant is the same sources with other flags; the library picks one when it is
loaded. pip's isolated build environment runs this file, so it imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGINS = HERE.parents[1]
LIBRARY = "libllmctl_cpu.so"

# -ffp-contract=off: only explicit fused multiply-adds, so that variants agree bit for bit.
# -fno-trapping-math: nothing reads exception flags, so loops with a division may be vectorized.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
)
WARNINGS = ("-Wall", "-Wextra")
V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
V4 = (*V3, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"generic": (), "v3": V3, "v4": V4},
    "other": {"generic": ()},
}


class CompilerMissing(SystemExit):
    """No C++ compiler: pip shows this text as the reason."""


def source_files() -> list[Path]:
    """Every file the library is compiled from, in a fixed order."""
    return sorted(path for suffix in ("h", "cpp") for path in PLUGINS.rglob(f"*.{suffix}"))


def source_hash() -> str:
    """Identifies the sources, so that a library built from other sources is detected."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(
            path.relative_to(PLUGINS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or the first of c++, g++, clang++ on the path."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise CompilerMissing(
        "llmctl compiles its CPU kernels and found no C++ compiler (looked for $CXX, c++, g++, "
        "clang++). Install one, for example: sudo apt-get install g++"
    )


def compile_library(target: Path, checks: tuple[str, ...] = ()) -> None:
    """Write the shared library to `target`. Exits with the compiler's messages on failure.

    checks: flags of a build that looks for errors, which has the portable variant alone and the
    asserts of kernels.
    """
    compiler = find_compiler()
    variants = VARIANTS.get("other" if checks else platform.machine(), VARIANTS["other"])
    flags_of_all = (*FLAGS, *WARNINGS, *((*checks, "-DLLMCTL_DEBUG") if checks else ()))
    defines = f'-DLLMCTL_SOURCE_HASH="{source_hash()}"'
    with tempfile.TemporaryDirectory() as folder:
        units = [
            (HERE / "variant.cpp", Path(folder, f"{name}.o"), (*flags, f"-DLLMCTL_ISA={name}"))
            for name, flags in variants.items()
        ]
        units += [
            (HERE / f"{stem}.cpp", Path(folder, f"{stem}.o"), (defines,))
            for stem in ("program", "pool", "ranks", "sampling", "beam_search")
        ]
        loader = PLUGINS / "backends" / "cuda" / "load.cpp"  # of weights, whatever runs them
        units.append((loader, Path(folder, "load.o"), ()))
        commands = [
            [*compiler, *flags_of_all, *extra, "-c", str(source), "-o", str(out)]
            for source, out, extra in units
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(folder, LIBRARY)
        objects = [str(out) for _, out, _ in units]
        _run([*compiler, "-shared", "-pthread", *checks, *objects, "-o", str(linked)])
        # renamed into place, so that a running process keeps the library it has mapped
        staged = target.with_name(target.name + ".partial")
        shutil.copyfile(linked, staged)
        os.replace(staged, target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.stderr:
        print(result.stderr, file=sys.stderr, end="")
    if result.returncode != 0:
        raise SystemExit(f"compiling the CPU kernels failed: {shlex.join(command)}")


if __name__ == "__main__":
    compile_library(HERE / LIBRARY)
