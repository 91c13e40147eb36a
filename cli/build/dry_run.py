"""`llmctl build --dry-run`: how much memory an engine needs, and what fits with it.

The memory is that of a GPU, named or present, or this machine's for the cpu backend. On a GPU the
plan is the one that `run` makes before it loads an engine (runtime/engines/memory_plan.py):
weights, activations, scratch and graphs first, then a fraction of the rest for the KV cache.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.backends import is_auto
from llmctl.cli.gpus import GB, Gpu, default_gpu, find_gpu, present_gpu
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cuda.arch import ARCHS

if TYPE_CHECKING:
    from llmctl.builder.engine_plan import EnginePlan
    from llmctl.runtime.engines.memory_plan import EngineMemory

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORTEST = 512  # tokens; the lengths in the table double from here to max_seq_len


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory to plan for. gpu: None for the machine's own memory."""

    name: str
    total_bytes: int
    free_bytes: int
    gpu: Gpu | None


def backend_for(backend: str, gpu: str | None) -> str:
    """The backend to plan for: "auto" is what runs on the GPU that is named, if one is.

    Raises BadConfig, and Unsupported for a GPU that no backend serves or `backend` does not, also
    where it has too few multiprocessors: `run` would refuse the engine there."""
    if gpu is None:
        return backend
    found = find_gpu(gpu)
    serving = {row.name: row.capabilities for row in BACKENDS.values() if row.capabilities}
    if is_auto(backend):
        able = [name for name, served in serving.items() if found.compute_capability in served]
        if not able:
            raise Unsupported(
                f"--gpu {gpu} has compute capability {found.compute_capability}, which none of "
                f"{', '.join(serving)} serves",
                fix="--backend tensorrt, on a machine with such a GPU",
            )
        return _with_enough_multiprocessors(able[0], found)
    if backend in serving and found.compute_capability not in serving[backend]:
        raise Unsupported(
            f"--gpu {gpu} has compute capability {found.compute_capability}; {backend} engines are "
            f"for {', '.join(serving[backend])}",
            fix="--backend auto",
        )
    return _with_enough_multiprocessors(backend, found)


def _with_enough_multiprocessors(backend: str, gpu: Gpu) -> str:
    """The backend. Raises Unsupported; TensorRT's kernels take as many as there are."""
    needed = ARCHS[gpu.compute_capability].num_sms if gpu.compute_capability in ARCHS else 0
    row = BACKENDS.get(backend)
    if row and row.on_gpu and not row.compiles_plans and (gpu.num_sms or needed) < needed:
        raise Unsupported(
            f"--gpu {gpu.name} has {gpu.num_sms} multiprocessors; {backend} engines need {needed}, "
            "whose thread blocks wait for each other",
            fix="an H100 SXM or H200 (--gpu h100, --gpu h200), or --backend cpu without --gpu",
        )
    return backend


def needs_binaries(backend: str) -> bool:
    """Whether a plan needs what is compiled: TensorRT's plans say what memory they take, our own
    kernels take none worth a word. An unknown backend is refused by the plan."""
    return backend in BACKENDS and BACKENDS[backend].compiles_plans


def choose_memory(
    backend: str, gpu: str | None, gpu_memory_gb: float | None, capability: str | None = None
) -> Memory:
    """The memory to plan for; capability: the compute capabilities of the engine, with commas.

    Raises BadConfig."""
    if not BACKENDS[backend].on_gpu:
        if gpu is not None or gpu_memory_gb is not None:
            raise BadConfig("--gpu and --gpu-memory have no effect on cpu engines")
        return _host_memory()
    found = find_gpu(gpu) if gpu is not None else present_gpu()
    is_present = gpu is None and found is not None
    if found is None:
        found = default_gpu((capability or "").split(","))
    if gpu_memory_gb is not None:
        total = int(gpu_memory_gb * GB)
        return Memory(f"{gpu_memory_gb:g} GB", total, total, replace(found, memory_bytes=total))
    free = found.memory_bytes
    if is_present:
        import torch

        free = torch.cuda.mem_get_info()[0]
    return Memory(found.name, found.memory_bytes, free, found)


def _host_memory() -> Memory:
    import os

    from llmctl.plugins.backends.host_memory import free_memory_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory("this machine", total, free_memory_bytes(), None)


def plan_memory(engine: EnginePlan, memory: Memory, output_dir: Path) -> dict[str, Any]:
    """The plan as numbers; sizes in bytes. If something does not fit, that is reported, not raised.

    Sizes of parts are those of one rank, and on a GPU so is the memory; a CPU's is shared by all
    `ranks_here`. fits: whether the engine and one KV block of each rank fit. needed_bytes: what
    there is before any KV cache. table: for each length and batch size, the bytes of everything in
    the memory, None if that is more than there is.
    """
    from llmctl.runtime.engines.memory_plan import (
        DEFAULT_DEVICE_FRACTION,
        DEFAULT_FREE_FRACTION,
        RESERVED_BYTES,
    )

    parts = _engine_memory(engine, memory)
    is_gpu = memory.gpu is not None
    ranks_here = 1 if is_gpu else engine.limits.tp_size
    reserved = RESERVED_BYTES if is_gpu else _segment_bytes(ranks_here)
    # On the cpu weights stay mapped in the page cache, which counts as free; they still need room.
    fixed = ranks_here * parts.fixed_bytes + reserved
    block_bytes = ranks_here * parts.kv_bytes_per_block
    fraction = DEFAULT_DEVICE_FRACTION if is_gpu else DEFAULT_FREE_FRACTION
    left = memory.free_bytes - fixed
    kv_limit = max(0, int(left * fraction))
    tokens_per_block = parts.tokens_per_block
    lengths = _lengths(parts.max_seq_len)
    sequences = [_blocks(length, tokens_per_block) * block_bytes for length in lengths]
    return {
        "memory": memory.name,
        "num_ranks": engine.limits.tp_size,
        "ranks_here": ranks_here,
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "weight_bytes": parts.weight_bytes,
        "activation_bytes": parts.activation_bytes,
        "scratch_bytes": parts.scratch_bytes,
        "graph_bytes": parts.graph_bytes,
        "reserved_bytes": reserved,
        "needed_bytes": fixed,
        "kv_fraction": fraction,
        "kv_limit_bytes": kv_limit,
        "kv_bytes_per_token": parts.kv_bytes_per_block // tokens_per_block,
        "max_kv_tokens": kv_limit // block_bytes * tokens_per_block,
        "fits": left > 0 and kv_limit >= block_bytes,
        "table": {
            "batch_sizes": list(BATCH_SIZES),
            "lengths": lengths,
            "bytes": [_row(fixed, size, kv_limit) for size in sequences],
            "most_sequences": [kv_limit // size for size in sequences],
        },
        "disk": _disk(engine, output_dir),
    }


def _segment_bytes(num_ranks: int) -> int:
    """Memory in which ranks of one machine exchange sums and commands."""
    from llmctl.plugins.backends.cpu.binding import load_kernels

    return int(load_kernels().llmctl_ranks_bytes(num_ranks)) if num_ranks > 1 else 0


def _row(fixed: int, sequence: int, kv_limit: int) -> list[int | None]:
    """Bytes of everything at each batch size; None where the KV cache has no room."""
    return [
        fixed + batch * sequence if batch * sequence <= kv_limit else None for batch in BATCH_SIZES
    ]


def _lengths(max_seq_len: int) -> list[int]:
    lengths = []
    length = SHORTEST
    while length < max_seq_len:
        lengths.append(length)
        length *= 2
    return [*lengths, max_seq_len]


def _blocks(tokens: int, tokens_per_block: int) -> int:
    return -(-tokens // tokens_per_block)


def _engine_memory(engine: EnginePlan, memory: Memory) -> EngineMemory:
    """What the engine takes besides its KV cache, as its runtime counts it."""
    from llmctl.runtime.engines.memory_plan import EngineMemory

    limits = engine.limits
    if memory.gpu is None:
        return EngineMemory(
            role="target",
            weight_bytes=engine.summary()["weight_bytes"],
            activation_bytes=engine.plan.arena_bytes,
            scratch_bytes=0,
            graph_bytes=0,
            kv_bytes_per_block=engine.kv_bytes_per_token * limits.tokens_per_block,
            tokens_per_block=limits.tokens_per_block,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
        )
    from llmctl.builder.engine_kernels import scratch_bytes
    from llmctl.builder.step_limits import step_limits
    from llmctl.runtime.engines.engine_file import EngineFile, exchange_bytes
    from llmctl.runtime.engines.open_cuda import sampling_bytes
    from llmctl.runtime.rounds.upload import state_bytes, tree_bytes

    steps = step_limits(engine.plan, limits.to_dict())
    plan = replace(engine.plan, scratch_bytes=scratch_bytes(engine.plan, steps))
    sizes = (limits.max_batch_size, limits.max_draft_len)
    other_bytes = sampling_bytes([plan]) + state_bytes(*sizes)
    other_bytes += tree_bytes(plan, *sizes, steps.lookahead)
    summary = engine.summary()
    other_bytes += summary["trt_bytes"] + summary["trt_memory_bytes"]
    file = EngineFile(engine.config, plan, ())
    other_bytes += exchange_bytes([file])
    return file.memory("target", other_bytes)


def _disk(engine: EnginePlan, output_dir: Path) -> dict[str, Any]:
    """Bytes that the engine directory takes, and those free where it would be; None where the
    weights are elsewhere, and so is where it would be."""
    from llmctl.quantize.checkpoint import has_weights

    side = sum(path.stat().st_size for path in engine.checkpoint.tokenizer_files())
    needed = engine.file_bytes * engine.limits.tp_size + side
    is_stored = engine.config.weights["load_format"] == "auto"
    if is_stored and not has_weights(engine.checkpoint.path):
        return {"needed_bytes": needed, "free_bytes": None, "folder": None, "fits": True}
    place = output_dir.absolute()
    folder = next(p for p in (*place.parents, place) if p.is_dir())
    free = shutil.disk_usage(folder).free
    return {
        "needed_bytes": needed,
        "free_bytes": free,
        "folder": str(folder),
        "fits": needed <= free,
    }
