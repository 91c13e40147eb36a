"""CUDA C++ to cubin through NVRTC, found and called with ctypes.

NVRTC needs neither a GPU nor a CUDA toolkit. The sources are self-contained: they include only
files below plugins/, never CUDA's or the host's headers.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from functools import cache
from pathlib import Path

from llmctl.errors import KernelCompileError, MissingPackage


@cache
def nvrtc() -> ctypes.CDLL:
    """The loaded library: the wheel's, else torch's, else the system's; else MissingPackage."""
    wheels = _in_wheels()
    for candidate in (*wheels, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            if candidate in wheels:  # opens its built-ins by name alone: load those beside it
                for builtins in Path(candidate).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(candidate)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = c_char_p
        return library
    raise MissingPackage(
        "NVRTC (libnvrtc.so), which compiles the CUDA kernels, was not found",
        fix='pip install "nvidia-cuda-nvrtc>=13,<14"',
    )


def _in_wheels() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    return [str(path) for path in sorted(found, reverse=True)]  # cuda_nvrtc is CUDA 12's


@cache
def version() -> str:
    """The compiler's version, "13.0"."""
    major, minor = c_int(), c_int()
    _check(nvrtc().nvrtcVersion(byref(major), byref(minor)))
    return f"{major.value}.{minor.value}"


def compile_source(source: str, name: str, options: Sequence[str]) -> bytes:
    """The cubin of `source`; KernelCompileError with the compiler's log where it does not compile.

    name: what the log calls the file.
    """
    library, program = nvrtc(), c_void_p()
    _check(
        library.nvrtcCreateProgram(
            byref(program), source.encode(), name.encode(), c_int(0), None, None
        )
    )
    try:
        flags = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, c_int(len(options)), flags):
            raise KernelCompileError(f"{name} does not compile:\n{_log(program)}")
        size = c_size_t()
        _check(library.nvrtcGetCUBINSize(program, byref(size)))
        cubin = create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _log(program: c_void_p) -> str:
    size = c_size_t()
    _check(nvrtc().nvrtcGetProgramLogSize(program, byref(size)))
    log = create_string_buffer(size.value)
    _check(nvrtc().nvrtcGetProgramLog(program, log))
    return log.value.decode(errors="replace")


def _check(status: int) -> None:
    if status:
        raise KernelCompileError(f"NVRTC: {nvrtc().nvrtcGetErrorString(status).decode()}")
