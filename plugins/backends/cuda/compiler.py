"""Compiles kernels to cubins without a GPU: Triton ahead of time, CUDA C++ with NVRTC.

The result contains everything a launch needs, so that running an engine compiles nothing and
imports neither compiler. Results are kept in a cache folder, keyed by the kernel's sources, its
spec and the compilers' versions.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmctl.errors import KernelCompileError, Unsupported
from llmctl.plugins.backends.cuda import nvrtc
from llmctl.plugins.backends.cuda.arch import ARCHS, HOPPER
from llmctl.plugins.backends.cuda.cubin import read_cubin
from llmctl.plugins.backends.cuda.kernel_spec import Constant, KernelSpec
from llmctl.plugins.backends.cuda.sources import (
    included_files,
    load_function,
    triton_compiler,
    triton_sources,
    triton_version,
)
from llmctl.plugins.core.cache_home import cache_home
from llmctl.publish import write_cached

PLUGINS = Path(__file__).resolve().parents[2]
# Triton appends pointers to two scratch areas to every kernel's parameters; no kernel of ours may
# use them, so a launch passes null.
TRITON_HIDDEN_ARGUMENTS = 2
ARGUMENT_BYTES = {"i32": 4, "i64": 8, "fp32": 4, "tensor_map": 128}
_FORMAT = 3  # of the cached files, and of how they are compiled


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One binary and how to launch it."""

    name: str  # KernelSpec.name
    entry: str  # the function within the cubin
    cubin: bytes
    threads: int  # per thread block
    shared_bytes: int  # dynamic shared memory per thread block
    arguments: tuple[str, ...]  # KernelSpec.arguments
    cluster: int  # thread blocks per cluster, along x
    num_hidden_arguments: int  # null pointers to pass after the declared arguments
    registers: int  # a thread
    local_bytes: int  # stack bytes per thread: 0 unless registers spill

    def metadata(self) -> dict[str, Any]:
        """Everything but the cubin, as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cubin"}
        return {**values, "arguments": list(self.arguments)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], cubin: bytes) -> CompiledKernel:
        """The inverse of `metadata`."""
        return cls(**{**metadata, "arguments": tuple(metadata["arguments"])}, cubin=cubin)


def runs_on(spec: KernelSpec, capability: str) -> bool:
    """Whether there is a binary of this spec for a compute capability: not every one has CUDA C++
    sources, or E4M3."""
    arch = ARCHS[capability]
    if not spec.is_triton:
        return bool(arch.cuda_target)
    return arch.has_fp8 or "*fp8e4nv" not in spec.arguments


def compiler_versions(specs: Iterable[KernelSpec]) -> dict[str, str]:
    """The versions of the compilers. Raises MissingPackage if NVRTC is needed and absent."""
    kinds = {spec.is_triton for spec in specs}
    found = {"triton": triton_version()} if True in kinds else {}
    return found | ({"nvrtc": nvrtc.version()} if False in kinds else {})


def is_needed(spec: KernelSpec, capability: str) -> bool:
    """Whether an engine for a compute capability contains a binary of this spec."""
    return runs_on(spec, capability) and spec.unused_on != capability


def uses_pdl(capability: str) -> bool:
    """Whether kernels for a compute capability wait for their predecessor themselves (programmatic
    dependent launch); launches must then request it, and otherwise must not."""
    return ARCHS[capability].has_pdl


def compile_kernel(spec: KernelSpec, capability: str = HOPPER.capability) -> CompiledKernel:
    """Compile one spec, or take it from the cache.

    Raises Unsupported for another compute capability, MissingPackage where a compiler is not
    installed, KernelCompileError where the source does not compile or does not have the spec's
    arguments.
    """
    if capability not in ARCHS:
        raise Unsupported(
            f"there are no kernels for compute capability {capability}; "
            f"wanted one of {', '.join(ARCHS)}"
        )
    if not runs_on(spec, capability):
        raise Unsupported(f"{spec.name} cannot be compiled for compute capability {capability}")
    key = _key(spec, capability)
    if key not in _memo:
        path = cache_folder() / f"{key}.kernel"
        found = _read(path)
        if found is None:
            found = compile_anew(spec, capability)
            _write(path, found)
        _memo[key] = found
    found = _memo[key]
    if (found.name, found.arguments) == (spec.name, spec.arguments):
        return found
    return _described(
        spec,
        found.entry,
        found.cubin,
        found.threads,
        found.shared_bytes,
        found.num_hidden_arguments,
    )


def compile_anew(spec: KernelSpec, capability: str = HOPPER.capability) -> CompiledKernel:
    """Like `compile_kernel` with an empty cache; stores nothing."""
    return _compile_triton(spec, capability) if spec.is_triton else _compile_cuda(spec, capability)


def is_cached(spec: KernelSpec, capability: str = HOPPER.capability) -> bool:
    """Whether `compile_kernel` would find the spec in the cache folder."""
    return _read(cache_folder() / f"{_key(spec, capability)}.kernel") is not None


_memo: dict[str, CompiledKernel] = {}
_triton_settings = threading.Lock()  # Triton has them per process, not per thread


def _compile_triton(spec: KernelSpec, capability: str) -> CompiledKernel:
    triton = triton_compiler()
    function = load_function(spec.source)
    runtime = [name for name in function.arg_names if name not in spec.constants]
    unknown = set(spec.constants) - set(function.arg_names)
    if unknown or len(runtime) != len(spec.arguments) or spec.cluster != 1 or spec.shared_bytes:
        raise KernelCompileError(
            f"{spec.name}: {spec.source} has run-time arguments {runtime}, the spec "
            f"{list(spec.arguments)}; constants it does not have: {sorted(unknown)}; "
            "Triton decides shared memory and has no clusters here"
        )
    signature = dict.fromkeys(function.arg_names, "constexpr")
    signature.update(zip(runtime, spec.arguments, strict=True))
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in zip(runtime, spec.arguments, strict=True)
        if kind.startswith("*")
    }
    constants = dict(spec.constants)
    if constants.get("PDL") and not uses_pdl(capability):
        constants["PDL"] = False
    source = triton.compiler.ASTSource(function, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", int(capability.replace(".", "")), 32)
    # Line numbers contain file names of this machine: an engine would depend on where it was built.
    options = {
        "ptx_options": "-suppress-debug-info",
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
    }
    try:
        # Triton's own cache, below the user's home, would be a second one of the same kernels.
        with (
            _triton_settings,
            tempfile.TemporaryDirectory() as scratch,
            triton.knobs.cache.scope(),
        ):
            triton.knobs.cache.dir = scratch
            built = triton.compile(source, target=target, options=options)
    except Exception as error:  # Triton raises any exception of its Python front end
        raise KernelCompileError(f"{spec.name} does not compile: {error}") from error
    metadata = built.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise KernelCompileError(f"{spec.name} needs Triton's global scratch memory")
    room = ARCHS[capability].max_shared_bytes
    if metadata.shared > room:
        raise KernelCompileError(
            f"{spec.name} needs {metadata.shared} bytes of shared memory; "
            f"compute capability {capability} has {room} for a thread block"
        )
    return _described(
        spec,
        metadata.name,
        bytes(built.asm["cubin"]),
        32 * metadata.num_warps,
        metadata.shared,
        TRITON_HIDDEN_ARGUMENTS,
    )


def _compile_cuda(spec: KernelSpec, capability: str) -> CompiledKernel:
    path = PLUGINS / spec.source
    options = [
        f"--gpu-architecture={ARCHS[capability].cuda_target}",
        "--std=c++17",
        f"--include-path={PLUGINS}",
        f"--include-path={path.parent}",
        *(f"-D{name}={_macro(value)}" for name, value in sorted(spec.constants.items())),
    ]
    cubin = nvrtc.compile_source(path.read_text(), spec.source, options)
    return _described(spec, spec.entry, cubin, 32 * spec.num_warps, spec.shared_bytes, 0)


def _macro(value: Constant) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _described(
    spec: KernelSpec, entry: str, cubin: bytes, threads: int, shared: int, hidden: int
) -> CompiledKernel:
    """Check the binary's parameters against the spec's and read its resources."""
    try:
        info = read_cubin(cubin, entry)
    except ValueError as error:
        raise KernelCompileError(f"{spec.name}: {error} ({spec.source})") from error
    wanted = tuple(ARGUMENT_BYTES.get(kind, 8) for kind in spec.arguments) + (8,) * hidden
    if info.parameters != wanted:
        raise KernelCompileError(
            f"{spec.name}: {entry} of {spec.source} has parameters of {list(info.parameters)} "
            f"bytes, but the spec's {list(spec.arguments)} need {list(wanted)}"
        )
    if info.max_threads and info.max_threads < threads:
        raise KernelCompileError(
            f"{spec.name}: {entry} of {spec.source} is bounded to {info.max_threads} threads, "
            f"but the spec's num_warps make {threads}"
        )
    return CompiledKernel(
        spec.name,
        entry,
        cubin,
        threads,
        shared,
        spec.arguments,
        spec.cluster,
        hidden,
        info.registers,
        info.local_bytes,
    )


# ---- the cache ----


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/llmctl/kernels, else below ~/.cache."""
    return cache_home() / "llmctl" / "kernels"


def _key(spec: KernelSpec, capability: str) -> str:
    if spec.is_triton:
        sources = triton_sources(load_function(spec.source))
        compiler = f"triton {triton_version()}"
    else:
        files = included_files(PLUGINS / spec.source, PLUGINS)
        sources = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
        compiler = f"nvrtc {nvrtc.version()}"
    described = {**asdict(spec), "constants": sorted(spec.constants.items())}
    # What does not affect the binary: products with and without a bias share one.
    for name in ("name", "unused_on", *(() if spec.is_triton else ("arguments",))):
        del described[name]
    content = json.dumps([_FORMAT, capability, compiler, sources, described], default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _read(path: Path) -> CompiledKernel | None:
    """A cached kernel: one line of JSON, then the cubin. None if absent or damaged."""
    try:
        line, _, cubin = path.read_bytes().partition(b"\n")
        stored = json.loads(line)
        if hashlib.sha256(cubin).hexdigest() != stored["sha256"]:
            return None
        return CompiledKernel.from_metadata(stored["kernel"], cubin)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, kernel: CompiledKernel) -> None:
    """Keep a kernel; a cache folder that cannot be written costs time, not correctness."""
    sha256 = hashlib.sha256(kernel.cubin).hexdigest()
    header = json.dumps({"sha256": sha256, "kernel": kernel.metadata()})
    write_cached(path, header.encode() + b"\n" + kernel.cubin)
