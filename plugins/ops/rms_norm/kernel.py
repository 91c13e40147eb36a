"""RMS normalization on a GPU: which binaries there are, and how a step launches them.

A thread block has a row. Between products that is `rows.cu` on Hopper: it has fewer instructions
than Triton's kernel, which counts where a long prompt's power lowers the clock, and of few rows
where the next product waits for them. Of 33 rows and more, blocks of 512 threads find room by four
on a multiprocessor that has nothing else to do, and then wait for memory together; so where there
are as many multiprocessors as rows, they ask for shared memory that they do not need, to be one on
each. Fewer rows are on as many multiprocessors anyway, beside blocks of products.
"""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.quantize.kernel import plan_rows, scaling_of

OWN_ROLES = frozenset({"weight", "scale"})
MOST_FEW = 32  # rows of a step that ask for residuals ahead
_PART, _MOST_PARTS = 256, 32  # elements of a warp; of a row
_SHARED_BYTES = 4 * _MOST_PARTS  # sums of squares
_ALONE_BYTES = HOPPER.max_shared_bytes // 2 + 1024  # two blocks have no room
_TYPES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width, dtype and set of roles, and those for steps of many rows."""
    if not _covers(call):
        return [_spec(call)]
    most = call.inputs["x"].shape[0]
    reached = [rows for rows in (1, MOST_FEW + 1, limits.num_sms + 1) if rows <= most]
    return [_spec(call), *(_rows_spec(call, rows, limits.num_sms) for rows in reached)]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Normalize the first rows of `x`; `residual_out` may be `residual` itself."""
    rows = env.count(shape)
    if rows == 0:
        return []
    weight = call.inputs["weight"]
    out = call.outputs["out"]
    # An absent role is not accessed: any tensor of its type can be passed.
    some_scale = call.outputs.get("out_scale", call.inputs.get("scale"))
    arguments = (
        call.inputs["x"],
        weight,
        call.inputs.get("residual", weight),
        call.inputs.get("scale", some_scale if some_scale is not None else weight),
        out,
        call.outputs.get("residual_out", weight),
        some_scale if some_scale is not None else weight,
        float(call.attributes["epsilon"]),
    )
    if env.use_pdl and _covers(call):
        stored = call.outputs.get("residual_out", 0)
        own = (*arguments[:5], stored, arguments[-1])
        return [Launch(_rows_spec(call, rows, env.limits.num_sms), (rows, 1, 1), own)]
    return [Launch(_spec(call), (rows, 1, 1), arguments)]


def _covers(call: OpCall) -> bool:
    """Whether rows.cu computes it."""
    x = call.inputs["x"]
    parts = x.shape[1] // _PART
    return (
        x.dtype in _TYPES
        and "residual" in call.inputs
        and scaling_of(call) == "static"
        and x.shape[1] % _PART == 0
        and parts <= _MOST_PARTS
    )


def _rows_spec(call: OpCall, rows: int, num_sms: int) -> KernelSpec:
    """The binary for steps of so many rows."""
    x = call.inputs["x"]
    is_few, is_alone = rows <= MOST_FEW, MOST_FEW < rows <= num_sms
    kind, hidden, has_sums = pointer(x.dtype), x.shape[1], "residual_out" in call.outputs
    words = ["rms_norm", "rows", short_name(x.dtype), f"h{hidden}"]
    words += ["residual_out"] * has_sums + ["few"] * is_few + ["alone"] * is_alone
    return KernelSpec(
        name=".".join(words),
        source="ops/rms_norm/rows.cu",
        arguments=(
            *(kind, kind, kind, "*fp32"),
            *(pointer(call.outputs["out"].dtype), kind if has_sums else "i64", "fp32"),
        ),
        constants={"MODEL_TYPE": _TYPES[x.dtype], "HIDDEN": hidden, "FEW": is_few},
        entry="norm_rows",
        num_warps=hidden // _PART,
        shared_bytes=_ALONE_BYTES if is_alone else _SHARED_BYTES,
    )


def _spec(call: OpCall) -> KernelSpec:
    x = call.inputs["x"]
    hidden = x.shape[1]
    plan = plan_rows(call, hidden, whole=True)
    has_residual, has_residual_out = "residual" in call.inputs, "residual_out" in call.outputs
    kind = pointer(x.dtype)
    scale = kind if plan.scaling == "none" else "*fp32"
    variant = [short_name(x.dtype), f"h{hidden}", plan.scaling]
    variant += ["residual"] * has_residual + ["residual_out"] * has_residual_out
    return KernelSpec(
        name=".".join(["rms_norm", *variant]),
        source="llmctl.plugins.ops.rms_norm.triton_kernel:rms_norm",
        arguments=(
            *(kind, kind, kind, scale),
            *(pointer(call.outputs["out"].dtype), kind, scale, "fp32"),
        ),
        constants={
            "HIDDEN": hidden,
            "BLOCK": plan.block,
            "HAS_RESIDUAL": has_residual,
            "HAS_RESIDUAL_OUT": has_residual_out,
            "STATIC_SCALE": plan.scaling == "static",
            "PER_TOKEN": plan.per_token,
            "PDL": True,
        },
        num_warps=plan.num_warps,
        unused_on=HOPPER.capability if _covers(call) else "",
    )
