"""The options of memory and scheduling that `run` and the `bench` commands share.

Written like those of `run_options.py`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from llmctl.errors import BadConfig
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy, refuse_step_limit
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy


def step_target(text: str | None) -> float | Literal["auto"] | None:
    """The value of --max-step-ms. Raises BadConfig."""
    if text is None or text == "auto":
        return None if text is None else "auto"
    value: object = text
    with suppress(ValueError):
        value = float(text)
    refuse_step_limit(value, is_chunked=True)
    return float(text)


def chunking_policy(given: ContextChunkingPolicy | None, is_chunked: bool) -> ContextChunkingPolicy:
    """The value of --context-chunking-policy. Raises BadConfig if chunking is off."""
    if given is not None and not is_chunked:
        raise BadConfig(
            "--context-chunking-policy is about chunks of prompts, and --no-enable-chunked-context "
            "has none",
            fix="leave one of the two out",
        )
    return given or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED


TrustedBuilder = Annotated[
    Path | None,
    Option(
        "--trusted-builder",
        metavar="KEYFILE",
        help="Refuse engines that this public key did not sign, or that changed since.",
        hidden=True,
    ),
]
TpSize = Annotated[
    int | None,
    Option("--tp-size", min=1, help="Ranks; default: as many as the engine has.", hidden=True),
]
RankTimeout = Annotated[
    float | None,
    Option(
        "--rank-timeout",
        metavar="S",
        help="Seconds that one rank waits for another before the run ends; default: 30.",
        hidden=True,
    ),
]
RanksOnOneDevice = Annotated[
    bool,
    Option(
        "--ranks-on-one-device",
        help="cuda, for tests: run all ranks of an engine on one GPU, in lockstep.",
        hidden=True,
    ),
]
EnableBlockReuse = Annotated[
    bool,
    Option(
        "--kv-cache-enable-block-reuse/--no-kv-cache-enable-block-reuse",
        help="Keep KV blocks of shared prefixes.",
        show_default="on",
        hidden=True,
    ),
]
FreeMemoryFraction = Annotated[
    float | None,
    Option(
        "--kv-cache-free-gpu-memory-fraction",
        help="Fraction of the memory left free by weights and activations that both KV caches may "
        "use; default 0.9 on a GPU, 0.5 of RAM.",
    ),
]
MaxTokens = Annotated[
    int | None,
    Option(
        "--max-tokens-in-paged-kv-cache",
        min=1,
        help="Upper bound of the KV cache in tokens; the smaller bound applies.",
        hidden=True,
    ),
]
HostMemoryBytes = Annotated[
    int | None,
    Option(
        "--kv-cache-host-memory-bytes",
        min=1,
        help="Host memory for evicted KV blocks, which are copied back when reused; default: none.",
        hidden=True,
    ),
]
AttentionWindows = Annotated[
    list[int] | None,
    Option(
        "--max-attention-window-size",
        help="Tokens that a layer attends to: one size for all, or a list repeated over the "
        "layers; default: the model's own.",
        hidden=True,
    ),
]
SinkTokenLength = Annotated[
    int | None,
    Option(
        "--sink-token-length",
        min=1,
        help="First tokens that stay visible in every window and count towards it; default: none.",
        hidden=True,
    ),
]
EnableChunkedContext = Annotated[
    bool,
    Option(
        "--enable-chunked-context/--no-enable-chunked-context",
        help="Read long prompts in chunks, in the same steps as running requests.",
        show_default="on",
        hidden=True,
    ),
]
SchedulerPolicy = Annotated[
    CapacitySchedulerPolicy,
    Option(
        "--scheduler-policy",
        help="guaranteed-no-evict: a request starts when the KV cache has room up to its end; "
        "max-utilization: when it has room now, pausing requests when it is full; static-batch: "
        "one batch after another.",
        show_default="guaranteed-no-evict",
        hidden=True,
    ),
]
ContextChunking = Annotated[
    ContextChunkingPolicy | None,
    Option(
        "--context-chunking-policy",
        help="Prompts that do not fit into a step are read one after another, or in parallel. "
        "(default: first-come-first-served)",
        hidden=True,
    ),
]
MaxBatchSize = Annotated[
    int | None,
    Option(
        "--max-batch-size", min=1, help="Requests in a step; default: the engine's.", hidden=True
    ),
]
MaxNumTokens = Annotated[
    int | None,
    Option("--max-num-tokens", min=1, help="Tokens of a step; default: the engine's.", hidden=True),
]
MaxStepMs = Annotated[
    str | None,
    Option(
        "--max-step-ms",
        metavar="MS|auto",
        help="Shrink prompt chunks until steps take no longer than this, or (auto) as far as "
        "throughput does not suffer; default: largest chunks.",
        hidden=True,
    ),
]
