"""The best ids of logits, found where they are computed: the product of many tokens keeps the
largest logit of each and stores no others (prefill_best.cuh), and a launch takes the ids.

For steps of which nothing but the best ids is wanted, on one rank. 120 rows of 128,256 logits are
62 MB, which would be written and read. Of a few rows they stay in L2, and `sampling.argmax` reads
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, StepLimits
from llmctl.plugins.ops.packed_linear.arguments import best_keys, name_of
from llmctl.plugins.ops.packed_linear.forms import few_tokens
from llmctl.plugins.ops.packed_linear.prefill import prefill_kernels, prefill_launches
from llmctl.plugins.ops.packed_linear.tactics import tactic_of

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

_ROWS = 128  # of a thread block that takes ids


def can_keep_best(call: OpCall) -> bool:
    """Whether a call computes logits, and so many that some step keeps the best ids alone."""
    if call.op != "packed_linear" or name_of(call.outputs["out"]) != "float32":
        return False
    return not call.attributes.get("is_partial", False) and keeps_best(
        call, len(call.outputs["out"])
    )


def keeps_best(call: OpCall, rows: int) -> bool:
    """Whether a step of so many rows, of which the best ids alone are wanted, stores no logits."""
    return rows > few_tokens(tactic_of(call))


def best_kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The binaries for a call that `can_keep_best`."""
    return [*prefill_kernels(best_call(call), limits), take_spec()]


def best_call(call: OpCall) -> OpCall:
    """The product that keeps the best ids alone."""
    return replace(call, attributes={**call.attributes, "keeps_best": True})


def best_launches(call: OpCall, env: LaunchEnv, rows: int) -> list[Launch]:
    """Multiply the first rows of `x`; keys of the best ids are where `take_launch` finds them."""
    return prefill_launches(best_call(call), env, rows)


def take_launch(
    call: OpCall, env: LaunchEnv, out: torch.Tensor, rows: int, *, stride: int = 1, offset: int = 0
) -> Launch:
    """out[r * stride + offset] = the best id of row r of the last `best_launches`; the lowest on
    ties, -1 if the row has NaN. Clears the keys."""
    arguments = (best_keys(call, env), out, rows, stride, offset)
    return Launch(take_spec(), (-(-rows // _ROWS), 1, 1), arguments)


def take_spec() -> KernelSpec:
    """The binary, for any vocabulary."""
    return KernelSpec(
        name="packed_linear.take_best",
        source="llmctl.plugins.ops.packed_linear.triton_kernel:take_best",
        arguments=("*i64", "*i32", "i32", "i32", "i32"),
        constants={"ROWS": _ROWS, "PDL": True},
        num_warps=4,
    )
