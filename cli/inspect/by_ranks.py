"""A step of an engine if it had another number of ranks, for `inspect`: computed from its own plan.

What a rank reads is divided anew, and its ranks meet twice a layer and once for the logits. A dry
run makes the plan of each number instead, which also says what each needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmctl.builder.engine_format import EngineConfig, Plan
from llmctl.builder.ranks import require_divisible, row_share
from llmctl.cli.gpus import Gpu, effective_read_bytes_s, shares_of
from llmctl.cli.inspect.cost import Step, step_bytes
from llmctl.cli.inspect.prediction import fastest
from llmctl.cli.rank_speed import Meeting, RankStep, head_meeting, rank_time, waits_of
from llmctl.errors import Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.fused.all_reduce_norm.spec import warps_of
from llmctl.plugins.schemes.table import scheme_of_algo

_PARTIAL_BYTES = 4  # float32, of sums


class _Widths:
    """What `require_divisible` asks of a model."""

    def __init__(self, model: Mapping[str, Any], plan: Plan) -> None:
        self.num_attention_heads = int(model["num_attention_heads"])
        self.num_key_value_heads = int(model["num_key_value_heads"])
        self.intermediate_size = int(model["intermediate_size"])
        self.head_size = plan.kv_cache.head_size


def steps_by_ranks(
    config: EngineConfig, plan: Plan, step: Step, gpu: Gpu
) -> dict[int, tuple[float, float]]:
    """Seconds of a step, at least and at most, by ranks on such GPUs: of the numbers of ranks that
    the backend has, those that divide the model and whose GPUs are joined."""
    model = config.pretrained_config
    scheme = scheme_of_algo(model["quantization"]["quant_algo"])
    layers, hidden = int(model["num_hidden_layers"]), int(model["hidden_size"])
    has_norm = BACKENDS[config.backend].packs_linears and warps_of(hidden) is not None
    whole = step_bytes(plan, step) * config.num_ranks
    found = {}
    for ranks in BACKENDS[config.backend].rank_counts or ():
        try:
            require_divisible(_Widths(model, plan), ranks)
        except Unsupported:
            continue
        read = whole // ranks
        if ranks == 1:
            speed = effective_read_bytes_s(gpu, read, shares_of(scheme))
            if speed is not None:
                found[1] = (read / speed, read / speed)
            continue
        share = row_share(int(model["vocab_size"]), ranks)
        met = [Meeting(_PARTIAL_BYTES * step.tokens * hidden, has_norm=has_norm)] * (2 * layers)
        met.append(head_meeting(share, step.tokens))
        time = rank_time(gpu, RankStep(ranks, layers, read, met), waits_of(scheme))
        if time is not None:
            found[ranks] = time.bounds_s
    return found


def draft_line(steps: Mapping[int, Sequence[float]]) -> Iterator[str]:
    """By bounds of a step: how many ranks the engine should have to draft for a target of so many,
    one or as many as that; nothing where only one of them is known."""
    if 1 in steps and len(steps) > 1:
        beside = [
            f"{fastest({1: steps[1], count: found})} beside a target of {count}"
            for count, found in steps.items()
            if count > 1
        ]
        yield f"ranks of it as a draft engine: {', '.join(beside)}"


def span(least: float, most: float) -> str:
    """Both bounds in three digits, or the one that they are."""
    low, high = f"{least:.3g}", f"{most:.3g}"
    return low if low == high else f"{low} to {high}"
