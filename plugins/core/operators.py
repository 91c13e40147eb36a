"""The table of operators: name -> spec, and the folder that holds its code."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from llmctl.errors import CorruptEngine
from llmctl.plugins.core.op_spec import OpSpec
from llmctl.plugins.fused.all_reduce_norm.spec import SPEC as ALL_REDUCE_NORM
from llmctl.plugins.fused.embedding_norm.spec import SPEC as EMBEDDING_NORM
from llmctl.plugins.fused.packed_linear_rope_kv.spec import SPEC as PACKED_LINEAR_ROPE_KV
from llmctl.plugins.fused.packed_linear_swiglu.spec import SPEC as PACKED_LINEAR_SWIGLU
from llmctl.plugins.ops.add.spec import SPEC as ADD
from llmctl.plugins.ops.all_gather.spec import SPEC as ALL_GATHER
from llmctl.plugins.ops.all_reduce.spec import SPEC as ALL_REDUCE
from llmctl.plugins.ops.concat.spec import SPEC as CONCAT
from llmctl.plugins.ops.embedding.spec import SPEC as EMBEDDING
from llmctl.plugins.ops.expand_logits.spec import SPEC as EXPAND_LOGITS
from llmctl.plugins.ops.gather_rows.spec import SPEC as GATHER_ROWS
from llmctl.plugins.ops.linear.spec import SPEC as LINEAR
from llmctl.plugins.ops.packed_linear.spec import SPEC as PACKED_LINEAR
from llmctl.plugins.ops.paged_attention.spec import SPEC as PAGED_ATTENTION
from llmctl.plugins.ops.quantize.spec import SPEC as QUANTIZE
from llmctl.plugins.ops.recurrence.spec import SPEC as RECURRENCE
from llmctl.plugins.ops.rms_norm.spec import SPEC as RMS_NORM
from llmctl.plugins.ops.rope_kv_write.spec import SPEC as ROPE_KV_WRITE
from llmctl.plugins.ops.silu.spec import SPEC as SILU
from llmctl.plugins.ops.swiglu.spec import SPEC as SWIGLU

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

_FOLDERS: Mapping[str, tuple[OpSpec, ...]] = {
    "ops": (
        EMBEDDING,
        RMS_NORM,
        LINEAR,
        PACKED_LINEAR,
        ROPE_KV_WRITE,
        PAGED_ATTENTION,
        SWIGLU,
        SILU,
        QUANTIZE,
        GATHER_ROWS,
        RECURRENCE,
        CONCAT,
        EXPAND_LOGITS,
        ALL_REDUCE,
        ALL_GATHER,
        ADD,
    ),
    "fused": (EMBEDDING_NORM, PACKED_LINEAR_SWIGLU, PACKED_LINEAR_ROPE_KV, ALL_REDUCE_NORM),
}
CPU_KINDS = (  # what the cpu backend has, in the order of Kind in its abi.h
    "embedding",
    "rms_norm",
    "linear",
    "rope_kv_write",
    "paged_attention",
    "swiglu",
    "quantize",
    "gather_rows",
    "silu",
    "recurrence",
    "concat",
    "expand_logits",
    "all_reduce",
    "all_gather",
    "add",
)
SPECS: Mapping[str, OpSpec] = {spec.name: spec for specs in _FOLDERS.values() for spec in specs}
_PACKAGES = {
    spec.name: f"llmctl.plugins.{folder}.{spec.name}"
    for folder, specs in _FOLDERS.items()
    for spec in specs
}


def operator_module(op: str, part: str) -> ModuleType:
    """One of an operator's modules: "reference", "kernel" or "tensorrt". ImportError if it has
    none."""
    return import_module(f"{_PACKAGES[op]}.{part}")


def has_module(op: str, part: str) -> bool:
    """Whether an operator has such a module."""
    return find_spec(f"{_PACKAGES[op]}.{part}") is not None


def check_call(call: OpCall) -> None:
    """Raise CorruptEngine for an unknown operator or a call that breaks its spec."""
    spec = SPECS.get(call.op)
    if spec is None:
        raise CorruptEngine(
            f"operator {call.op!r} of {call.name!r} is not one of {sorted(SPECS)}",
            fix="build the engine again with this version",
        )
    spec.check(call)
