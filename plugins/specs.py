"""The table of operators: name -> spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmctl.errors import CorruptEngine
from llmctl.plugins.embedding.spec import SPEC as EMBEDDING
from llmctl.plugins.embedding_norm.spec import SPEC as EMBEDDING_NORM
from llmctl.plugins.gather_rows.spec import SPEC as GATHER_ROWS
from llmctl.plugins.linear.spec import SPEC as LINEAR
from llmctl.plugins.packed_linear.spec import SPEC as PACKED_LINEAR
from llmctl.plugins.packed_linear_rope_kv.spec import SPEC as PACKED_LINEAR_ROPE_KV
from llmctl.plugins.packed_linear_swiglu.spec import SPEC as PACKED_LINEAR_SWIGLU
from llmctl.plugins.paged_attention.spec import SPEC as PAGED_ATTENTION
from llmctl.plugins.quantize.spec import SPEC as QUANTIZE
from llmctl.plugins.rms_norm.spec import SPEC as RMS_NORM
from llmctl.plugins.rope_kv_write.spec import SPEC as ROPE_KV_WRITE
from llmctl.plugins.spec import OpSpec
from llmctl.plugins.swiglu.spec import SPEC as SWIGLU

if TYPE_CHECKING:
    from llmctl.plugins.program import OpCall

SPECS: Mapping[str, OpSpec] = {
    spec.name: spec
    for spec in (
        EMBEDDING,
        EMBEDDING_NORM,
        RMS_NORM,
        LINEAR,
        PACKED_LINEAR,
        PACKED_LINEAR_SWIGLU,
        PACKED_LINEAR_ROPE_KV,
        ROPE_KV_WRITE,
        PAGED_ATTENTION,
        SWIGLU,
        QUANTIZE,
        GATHER_ROWS,
    )
}


def check_call(call: OpCall) -> None:
    """Raise CorruptEngine for an unknown operator or a call that breaks its spec."""
    spec = SPECS.get(call.op)
    if spec is None:
        raise CorruptEngine(
            f"operator {call.op!r} of {call.name!r} is not one of {sorted(SPECS)}",
            fix="build the engine again with this version",
        )
    spec.check(call)
