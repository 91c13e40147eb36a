"""Steps within an engine's limits, and the binaries that their launches name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import is_needed
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, StepLimits, StepShape
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT
from support.attention import World

TOKENS = (1, 2, 3, 4, 5, 8, 9, 11, 16, SHORT, 40, 65, 129)
CONTEXTS = (60, 512, 1024, 1100, 2048, 4096, 4097, 20000)  # where choices change


def limits_of(world: World, batch: int, tokens: int, longest: int, drafts: int) -> StepLimits:
    return replace(
        world.limits(),
        max_batch_size=batch,
        max_num_tokens=tokens,
        max_num_rows=tokens,
        max_seq_len=longest,
        max_draft_len=drafts,
    )


def shapes_within(limits: StepLimits) -> list[StepShape]:
    """Steps of chains of one length, alone and beside a chunk, and of trees."""
    found = []
    contexts = [each for each in CONTEXTS if each < limits.max_seq_len] + [limits.max_seq_len]
    batches = sorted({1, 2, 3, 5, 17, limits.max_batch_size})
    for requests, tokens, longest in product(batches, TOKENS, contexts):
        rows = requests * tokens
        fits = rows <= limits.max_num_tokens and requests <= limits.max_batch_size
        if not fits or tokens > longest:
            continue
        found.append(StepShape(rows, requests, rows, tokens, longest))
        if 1 < tokens <= limits.max_draft_len + 1 and limits.takes_trees:
            found.append(replace(found[-1], max_tree_len=limits.max_draft_len + 1))
        if requests > 1 and tokens == 1 and (most := limits.max_num_tokens - requests + 1) > SHORT:
            found.append(replace(found[-1], num_tokens=requests - 1 + most, max_query_len=most))
    return found


def needed(specs: list[KernelSpec]) -> set[str]:
    return {spec.name for spec in specs if is_needed(spec, HOPPER.capability)}


def on_no_device(_: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
