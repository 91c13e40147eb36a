"""What every `--tp-size` that a backend has would need on each GPU, and how fast a step would be.

An engine that does not fit has to be told what would: more ranks, a GPU with more memory, or fewer
bytes of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.cli.build.dry_run import Memory, plan_memory
from llmctl.cli.gpus import GPUS
from llmctl.cli.inspect.by_ranks import draft_line, span
from llmctl.cli.inspect.cost import DECODE
from llmctl.cli.inspect.prediction import fastest, predict_on_gpu
from llmctl.cli.table import size, table
from llmctl.errors import Unsupported
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    from llmctl.builder.engine_plan import EnginePlan

_HEAD = ("ranks", "weights", "beside", "KV tokens", "sequences", "step, ms")


def plan_ranks(
    engine: EnginePlan, plan_of: Callable[[int], EnginePlan], memory: Memory, output_dir: Path
) -> list[dict[str, Any]]:
    """A row for each number of ranks on GPUs of one kind. plan_of: the engine of so many ranks.

    refused: why the model does not divide so, else None; then the row has nothing else. Sizes are
    of one rank. step_ms: of one token after 1,000, at least and at most, computed; None where not
    enough is known of the GPU. Empty where ranks share one memory, and where any number may be.
    """
    if memory.gpu is None:
        return []
    return [
        _row(count, engine, plan_of, memory, output_dir)
        for count in BACKENDS[engine.config.backend].rank_counts or ()
    ]


def _row(
    count: int,
    engine: EnginePlan,
    plan_of: Callable[[int], EnginePlan],
    memory: Memory,
    output_dir: Path,
) -> dict[str, Any]:
    try:
        planned = engine if count == engine.limits.tp_size else plan_of(count)
    except Unsupported as error:
        return {"num_ranks": count, "refused": str(error)}
    assert memory.gpu is not None
    found = plan_memory(planned, memory, output_dir)
    bounds = predict_on_gpu(planned.config, planned.plan, DECODE, memory.gpu).bounds_s
    return {
        "num_ranks": count,
        "refused": None,
        "fits": found["fits"],
        "weight_bytes": found["weight_bytes"],
        "beside_bytes": found["needed_bytes"] - found["weight_bytes"],
        "needed_bytes": found["needed_bytes"],
        "kv_bytes_per_token": found["kv_bytes_per_token"],
        "max_kv_tokens": found["max_kv_tokens"],
        "most_sequences": found["table"]["most_sequences"][-1],  # of max_seq_len
        "step_ms": None if bounds is None else [1e3 * bound for bound in bounds],
    }


def rank_lines(
    rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], max_seq_len: int
) -> Iterator[str]:
    """The rows as a table, and which is fastest; nothing where there is no choice."""
    if sum(row["refused"] is None for row in rows) < 2:
        return
    free = plan["free_bytes"]
    yield ""
    yield f"by --tp-size, on each GPU ({plan['memory']}; sequences of {max_seq_len:,} tokens; step"
    yield "of one token after 1,000, computed, not measured: docs/performance/tensor_parallel.md)"
    yield from table([_HEAD, *(_cells(row, free) for row in rows)], right=range(len(_HEAD)))
    for row in rows:
        if row["refused"] is not None:
            yield f"{row['num_ranks']} ranks: {row['refused']}"
    steps = {row["num_ranks"]: row["step_ms"] for row in rows if row.get("fits") and row["step_ms"]}
    if len(steps) > 1:
        yield f"fastest: --tp-size {fastest(steps)}"
    yield from draft_line(steps)


def _cells(row: Mapping[str, Any], free: int) -> tuple[str, ...]:
    count = str(row["num_ranks"])
    if row["refused"] is not None:
        return (count, "-", "-", "-", "-", "-")
    parts = (count, size(row["weight_bytes"]), size(row["beside_bytes"]))
    if not row["fits"]:
        return (*parts, f"{size(row['needed_bytes'] - free)} too much", "-", "-")
    step = row["step_ms"]
    return (
        *parts,
        f"{row['max_kv_tokens']:,}",
        f"{row['most_sequences']:,}",
        "-" if step is None else span(*step),
    )


def advice_lines(
    rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], quantization: str | None
) -> Iterator[str]:
    """Why an engine does not fit, in numbers, and what would."""
    needed, free = plan["needed_bytes"], plan["free_bytes"]
    here = f"{plan['ranks_here']} ranks need" if plan["ranks_here"] > 1 else "a rank needs"
    yield f"does not fit in {size(free)}: {here} {size(needed)} before any KV cache"
    fitting = [row for row in rows if row.get("fits")]
    if fitting:
        row = min(fitting, key=lambda row: int(row["num_ranks"]))
        yield f"would fit: --tp-size {row['num_ranks']} ({size(row['needed_bytes'])} each)"
    gpu = GPUS.get(plan["memory"])
    larger = [
        f"{other.name} ({size(other.memory_bytes)})"
        for other in GPUS.values()
        if gpu is not None
        and other.compute_capability == gpu.compute_capability
        and other.memory_bytes > needed
    ]
    if larger:
        yield f"would fit: --gpu {', '.join(larger)}"
    if quantization is None:
        yield "would need about half: weights in FP8 (llmctl quantize --qformat fp8)"
