"""The sum over ranks and the norm on a GPU: one launch of `peers.cu` where ranks have a GPU each;
where all are on one device, the launches of the two operators."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    Peers,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.fused.all_reduce_norm.parts import norm_call, sum_call
from llmctl.plugins.fused.all_reduce_norm.spec import row_warps, warps_of
from llmctl.plugins.ops.all_reduce import kernel as all_reduce
from llmctl.plugins.ops.all_reduce.peers import (
    AFTER_SUM,
    MEETING_KINDS,
    SIZE_KINDS,
    hops_of,
    leaf_words,
    meeting_values,
    optional_kinds,
    optional_values,
    size_values,
)
from llmctl.plugins.ops.rms_norm import kernel as rms_norm

OWN_ROLES = frozenset({*AFTER_SUM, "norm_weight", "scale"})
# On the device at once, by ranks: three on a multiprocessor, or one with the registers of eight.
_MOST_BLOCKS = {2: 384, 4: 384, 8: 128}
_SHARED_BYTES = 2 * 32 * 4 + 2 * 8  # parts of sums of squares, barriers; as in peers.cu
_TYPES = {"bfloat16": "BF16", "float16": "FP16"}


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """Those for ranks on one device, and one for ranks with a device each."""
    total = call.inputs["residual"]  # has the sum's dtype and shape
    specs = [all_reduce.kernels(sum_call(call, total), limits)[0]]
    specs += rms_norm.kernels(norm_call(call, total), limits)
    ranks, most = int(call.attributes["ranks"]), call.inputs["x"].shape[0]
    if ranks == 1:
        return specs
    hops = range(1, 1 + hops_of(ranks, most, total.shape[1]))
    given = [_spec(call, 1, is_given=True)] if "pushed" in call.attributes else []
    return [*specs, *(_spec(call, count) for count in hops), *given]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """The first rows of what `x` is to each rank."""
    rows = env.count(shape)
    if rows == 0:
        return []
    if env.peers is not None:
        return [_launch(call, env.peers, rows)]
    residual = call.inputs["residual"]
    total = env.scratch(
        f"all_reduce_norm.{short_name(residual.dtype)}",
        (env.limits.max_num_tokens, residual.shape[1]),
        residual.dtype,
    )
    return [
        *all_reduce.launches(sum_call(call, total), env, shape),
        *rms_norm.launches(norm_call(call, total), env, shape),
    ]


def _spec(call: OpCall, hops: int, *, is_given: bool = False) -> KernelSpec:
    hidden, ranks = call.inputs["residual"].shape[1], int(call.attributes["ranks"])
    warps = warps_of(hidden)
    assert warps is not None, "as the spec's rules say"
    residual, out = call.inputs["residual"], call.outputs["out"]
    words = ["all_reduce_norm", "peers", short_name(residual.dtype), short_name(out.dtype)]
    words += [f"h{hidden}", f"r{ranks}", *leaf_words(call)]
    words += [*(role for role in AFTER_SUM if role in call.inputs)]
    keeps = hops == 2 and bool(call.attributes.get("keeps", 0))
    words += ["two_hops"] * (hops == 2) + ["keeps"] * keeps + ["given"] * is_given
    kind = pointer(residual.dtype)
    return KernelSpec(
        name=".".join([*words, *(["residual_out"] * ("residual_out" in call.outputs))]),
        source="fused/all_reduce_norm/peers.cu",
        arguments=(
            *(*MEETING_KINDS, "*fp32", *optional_kinds(call, *AFTER_SUM), kind, kind),
            *(*optional_kinds(call, "scale"), pointer(out.dtype)),
            *(*optional_kinds(call, "residual_out"), "fp32", *SIZE_KINDS),
        ),
        constants={
            "RANKS": ranks,
            "LEAVES": int(call.attributes.get("leaves", 1)),
            "HIDDEN": hidden,
            "WARPS": warps,
            "ROW_WARPS": row_warps(hidden),
            "MODEL_TYPE": _TYPES[str(residual.dtype).removeprefix("torch.")],
            "QUANTIZED": int("scale" in call.inputs),
            "HOPS": hops,
            "KEEPS": int(keeps),
            "IS_GIVEN": int(is_given),
        },
        entry="reduce_norm",
        num_warps=warps,
        shared_bytes=_SHARED_BYTES,
        cluster=row_warps(hidden) // warps,
    )


def _launch(call: OpCall, peers: Peers, rows: int) -> Launch:
    hops = hops_of(peers.num_ranks, rows, call.inputs["residual"].shape[1])
    is_given = hops == 1 and rows <= int(call.attributes.get("pushed", 0))
    spec = _spec(call, hops, is_given=is_given)
    clusters = min(rows, _MOST_BLOCKS[peers.num_ranks] // spec.cluster)
    arguments = (
        *meeting_values(call, peers),
        *(call.inputs["x"], *optional_values(call, *AFTER_SUM)),
        *(call.inputs["residual"], call.inputs["norm_weight"], *optional_values(call, "scale")),
        *(call.outputs["out"], *optional_values(call, "residual_out")),
        *(float(call.attributes["epsilon"]), *size_values(call, peers, rows)),
    )
    return Launch(spec, (clusters * spec.cluster, 1, 1), arguments)
