"""Loads the compiled CPU kernels and mirrors the structs of abi.h.

The first use loads the library, so importing this package costs nothing and works where the
library is absent.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from llmctl.errors import BadConfig, NoDevice, OutOfMemory, RankFailure, Unsupported
from llmctl.plugins.backends.host_cores import usable_cores

LIBRARY_PATH = Path(__file__).with_name("libllmctl_cpu.so")
MAX_THREADS = 1024  # each has a stack and 1 MiB of scratch
ABI_VERSION = 13  # kAbiVersion in abi.h
MAX_TENSORS = 8
MAX_ATTRIBUTES = 10
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "int8": 4, "int32": 5}

_FIX = "python -m llmctl.plugins.backends.cpu.compile  (or pip install again; needs g++ or clang++)"


class TensorRef(ctypes.Structure):
    """A tensor: address, dtype and the first two dimensions."""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * 2),
    ]


class Op(ctypes.Structure):
    """One operator call; tensors and attributes in the order of its spec."""

    _fields_ = [
        ("kind", c_int32),
        ("uses_rows", c_int32),
        ("tensors", TensorRef * MAX_TENSORS),
        ("integers", c_int64 * MAX_ATTRIBUTES),
        ("reals", c_double * MAX_ATTRIBUTES),
    ]


class Step(ctypes.Structure):
    """The integers of one step and where its KV cache is."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_requests", c_int32),
        ("num_rows", c_int32),
        ("max_blocks", c_int32),
        ("token_ids", c_void_p),
        ("position_ids", c_void_p),
        ("cu_q", c_void_p),
        ("kv_len", c_void_p),
        ("block_tables", c_void_p),
        ("slot_mapping", c_void_p),
        ("logit_rows", c_void_p),
        ("kv_cache", c_void_p),
        ("kv_dtype", c_int32),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("tokens_per_block", c_int32),
        ("head_size", c_int32),
        ("path_width", c_int32),
        ("num_blocks", c_int64),
        ("tree_start", c_void_p),
        ("paths", c_void_p),
        ("num_paths", c_int64),
        ("tree_roots", c_void_p),
        ("best_ids", c_void_p),
    ]


@cache
def load_kernels() -> ctypes.CDLL:
    """The loaded library, with as many threads as there are cores.

    Raises NoDevice when it is absent or was compiled from other sources than those beside it.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise NoDevice(f"the CPU kernels cannot be loaded: {error}", fix=_FIX) from error
    _refuse_stale(loaded)  # before the functions that an older one does not have
    loaded.llmctl_message.restype = c_char_p
    loaded.llmctl_isas.restype = c_char_p
    loaded.llmctl_set_isa.argtypes = [c_char_p]
    loaded.llmctl_program_create.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
    loaded.llmctl_program_destroy.argtypes = [c_void_p]
    loaded.llmctl_program_destroy.restype = None
    loaded.llmctl_run.argtypes = [c_void_p, c_void_p]
    loaded.llmctl_argmax.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    for function in (loaded.llmctl_sample, loaded.llmctl_probs, loaded.llmctl_log_softmax_at):
        function.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    for function in (loaded.llmctl_search_beams, loaded.llmctl_search_begin):
        function.argtypes = [c_void_p]
    loaded.llmctl_search_begin.restype = c_void_p
    loaded.llmctl_search_end.argtypes = [c_void_p]
    loaded.llmctl_top_log_probs.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
    loaded.llmctl_draw.argtypes = [c_void_p, c_int64, c_void_p]
    loaded.llmctl_draw.restype = c_int64
    loaded.llmctl_uniforms.argtypes = [c_void_p, c_int64, c_void_p]
    loaded.llmctl_uniforms.restype = None
    loaded.llmctl_set_num_threads.restype = None
    pointers = [c_void_p, c_void_p, c_void_p]
    loaded.llmctl_load.argtypes = [c_int32, c_void_p, c_int64, c_int64, c_int32, c_int32, *pointers]
    loaded.llmctl_load.restype = None
    sizes = [c_int64, c_int64, c_int32, c_int32]
    loaded.llmctl_load_ahead.argtypes = [c_int32, c_void_p, *sizes, c_int32, c_int64, *pointers]
    loaded.llmctl_load_ahead.restype = None
    loaded.llmctl_measure_read.argtypes = [c_void_p, c_int64]
    loaded.llmctl_measure_read.restype = c_double
    loaded.llmctl_measure_multiply_add.argtypes = [c_int64]
    loaded.llmctl_measure_multiply_add.restype = c_double
    loaded.llmctl_ranks_bytes.restype = c_int64
    loaded.llmctl_ranks_init.argtypes = [c_void_p, c_int32]
    loaded.llmctl_ranks_init.restype = None
    loaded.llmctl_ranks_join.argtypes = [c_void_p, c_int32, c_int64]
    loaded.llmctl_ranks_join.restype = c_void_p
    loaded.llmctl_ranks_leave.argtypes = [c_void_p]
    loaded.llmctl_ranks_leave.restype = None
    loaded.llmctl_ranks_lose.argtypes = [c_void_p, c_int32]
    loaded.llmctl_ranks_lose.restype = None
    for function in (loaded.llmctl_ranks_write, loaded.llmctl_ranks_read):
        function.argtypes = [c_void_p, c_void_p, c_int64]
    loaded.llmctl_set_num_threads(usable_cores())
    return loaded


def _refuse_stale(loaded: ctypes.CDLL) -> None:
    found = loaded.llmctl_abi_version()
    if found != ABI_VERSION:
        raise NoDevice(
            f"{LIBRARY_PATH} has ABI version {found}, wanted {ABI_VERSION}; it is out of date",
            fix=_FIX,
        )
    loaded.llmctl_source_hash.restype = c_char_p
    if not LIBRARY_PATH.with_name("variant.cpp").exists():
        return  # an installed wheel holds the library only
    from llmctl.plugins.backends.cpu.compile import source_hash

    built, present = loaded.llmctl_source_hash().decode(), source_hash()
    if built != present:
        raise NoDevice(
            f"{LIBRARY_PATH} was compiled from other sources ({built}, not {present})", fix=_FIX
        )


def check(status: int) -> None:
    """Raise the error that a non-zero status of a library function stands for."""
    if status == 0:
        return
    message = load_kernels().llmctl_message().decode()
    if status == 2:
        raise OutOfMemory(f"the CPU kernels could not allocate {message}")
    if status == 3:
        raise Unsupported(f"the CPU kernels do not support {message}")
    if status == 4:
        raise RankFailure(message)
    raise AssertionError(message)  # a step that breaks its own rules is a bug of the caller


def set_num_threads(count: int) -> None:
    """Use `count` threads, the calling one included, for everything after."""
    if not 1 <= count <= MAX_THREADS:
        raise BadConfig(f"the number of CPU threads is {count}; it must be 1 to {MAX_THREADS}")
    load_kernels().llmctl_set_num_threads(count)


def num_threads() -> int:
    """The number of threads in use."""
    return int(load_kernels().llmctl_num_threads())


def instruction_sets() -> list[str]:
    """Kernel variants this CPU can run, best first: v4 (AVX-512), v3 (AVX2), generic."""
    return str(load_kernels().llmctl_isas().decode()).split()


def set_instruction_set(name: str) -> None:
    """Use another variant of the kernels; v3 and v4 give the same bits."""
    check(load_kernels().llmctl_set_isa(name.encode()))
