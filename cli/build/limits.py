"""What an engine built with the default limits leaves unused: the requests that a GPU has room for.

Defaults are the same on every machine, so that one command builds one engine: --max-batch-size 8
and --max-num-tokens 2048 fit any GPU that holds the weights, and few requests need no more. Who
serves many is told here which limits the memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmctl.cli.table import size
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.engine_plan import EnginePlan
    from llmctl.cli.build.dry_run import Memory

# --max-batch-size with --max-num-tokens, the most first. Larger steps read prompts of many requests
# 5 to 10 % faster and delay those that generate (docs/performance/vllm_load.md), so few have small.
# A prompt of 8,192 tokens (4,096, 2,048) fits a step beside all that generate: its last tokens
# would take a step of their own.
CANDIDATES = ((256, 8448), (128, 8320), (64, 8256), (32, 4128), (16, 2064))
LENGTH = 2048  # tokens of a sequence that there is to be room for


def limits_note(
    engine: EnginePlan,
    memory: Memory,
    plan: Callable[[BuildRequest], EnginePlan],
    request: BuildRequest,
) -> str | None:
    """Which limits would let more requests run at once in this memory; None if none would.

    `plan` plans an engine without compiling anything, here those of larger limits.
    """
    from llmctl.cli.build.dry_run import plan_memory

    length = min(LENGTH, engine.limits.max_seq_len)
    own = plan_memory(engine, memory, engine.checkpoint.path)
    for batch, tokens in CANDIDATES:
        if batch <= request.max_batch_size:
            return None
        larger = plan(replace(request, max_batch_size=batch, max_num_tokens=tokens))
        found = plan_memory(larger, memory, engine.checkpoint.path)
        if found["fits"] and batch * length <= found["max_kv_tokens"]:
            more = found["needed_bytes"] - own["needed_bytes"]
            return (
                f"{request.max_batch_size} requests run together, with {request.max_num_tokens} "
                f"tokens a step (the defaults); {memory.name} has room for {batch} of {length} "
                f"tokens: --max-batch-size {batch} --max-num-tokens {tokens} "
                f"(takes {size(more)} from the KV cache)"
            )
    return None


def advise_limits(
    engine: EnginePlan,
    plan: Callable[..., EnginePlan],
    request: BuildRequest,
    given: Mapping[str, object],
) -> tuple[str, ...]:
    """`limits_note` for the GPU that is here, or else the usual one of the engine's kind, where
    neither limit was given and the engine's own plan says what memory it takes."""
    from llmctl.builder.config import BuildRequest
    from llmctl.cli.build.dry_run import choose_memory, needs_binaries

    backend = engine.config.backend
    names = ("max_batch_size", "max_num_tokens")
    is_chosen = any(
        given.get(name) is not None or getattr(request, name) != getattr(BuildRequest(), name)
        for name in names
    )
    if is_chosen or not BACKENDS[backend].on_gpu or needs_binaries(backend):
        return ()
    memory = choose_memory(backend, None, None, engine.config.compute_capability)
    note = limits_note(engine, memory, partial(plan, with_binaries=False), request)
    return () if note is None else (note,)
