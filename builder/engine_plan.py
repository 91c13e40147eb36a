"""All decisions about an engine, made before a weight is read, and the memory that it will take.

`build.plan_build` makes it, and `build.run_build` writes the engine. A dry run shows its summary,
and the build cache key is computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmctl.builder.binaries import Binaries
from llmctl.builder.config import BuildConfig
from llmctl.builder.engine_format import (
    EngineConfig,
    Plan,
    engine_bytes,
    kv_bytes_per_token,
    trt_memory_bytes,
    weight_bytes,
)
from llmctl.builder.network import Network
from llmctl.builder.sharding import Shard
from llmctl.builder.sources import Source
from llmctl.builder.tensorrt.pieces import Piece
from llmctl.quantize.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything decided about one engine before a weight is read."""

    checkpoint: Checkpoint
    config: EngineConfig  # `files` is filled in when they are written
    network: Network  # of the base graph
    plan: Plan
    sources: Mapping[str, Source]
    limits: BuildConfig
    shards: tuple[Shard, ...]  # the checkpoint as each rank reads it
    pieces: tuple[Piece, ...]  # tensorrt only
    binaries: Binaries  # by their tensors' names: kernels of cuda, plans of TensorRT
    notices: tuple[str, ...]  # messages about adjusted limits and unread tensors

    @property
    def file_bytes(self) -> int:
        """Bytes of the engine file."""
        return engine_bytes(self.plan)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache one token takes over all layers."""
        return kv_bytes_per_token(self.plan)

    def summary(self) -> dict[str, Any]:
        """The memory plan of a rank as numbers, for --dry-run and --json."""
        build = self.config.build_config
        return {
            "architecture": self.config.pretrained_config["architecture"],
            "backend": self.config.backend,
            "dtype": self.network.dtype,
            "quantization": self.config.pretrained_config["quantization"],
            "num_ops": len(self.plan.ops),
            "compute_capability": self.config.compute_capability,
            "load_format": self.config.weights["load_format"],
            "engine_bytes": self.file_bytes,
            "weight_bytes": weight_bytes(self.plan),
            "activation_bytes": self.plan.arena_bytes,
            "scratch_bytes": self.plan.scratch_bytes,
            "num_kernels": len(self.plan.kernels),
            "kernel_bytes": sum(kernel.num_bytes for kernel in self.plan.kernels),
            "num_trt_pieces": len(self.plan.trt_pieces),
            "trt_bytes": sum(piece.num_bytes for piece in self.plan.trt_pieces),
            "trt_memory_bytes": trt_memory_bytes(self.plan),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_sequence": self.kv_bytes_per_token * build["max_seq_len"],
            **{
                name: build[name]
                for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len")
            },
        }
