"""What tests of decoder_layers share."""

from __future__ import annotations

import torch

from llmctl.builder.engine_kernels import (
    meta_cache,
    meta_calls,
    meta_step,
)
from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepShape
from llmctl.plugins.fused.decoder_layers.chain import find_layers
from llmctl.plugins.fused.decoder_layers.kernel import (
    Chain,
    find_chain,
)
from llmctl.plugins.fused.decoder_layers.tactics import EVERYWHERE
from scripts.bench.plan_support import planned

ONE = StepShape(num_tokens=1, num_requests=1, num_rows=1, max_query_len=1, max_kv_len=1024)


def chain_of(name: str, most_tokens: int = 1, whole: bool = False, **options) -> Chain | None:
    plan, limits = planned(name, **options)
    calls = [call for call, _ in meta_calls(plan)]
    return find_chain(
        find_layers(calls, limits), limits, most_tokens=most_tokens, tactic=EVERYWHERE, whole=whole
    )


def env_of(name: str, sizes: dict[str, int] | None = None) -> LaunchEnv:
    plan, limits = planned(name)

    def scratch(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if sizes is not None:
            sizes[key] = shape[0] * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")

    return LaunchEnv(meta_step(limits), meta_cache(plan, limits), limits, "tokens", scratch)


def measured(monkeypatch, ms: dict, pace: dict, own_binary: dict | None = None) -> None:
    table = {"ms": ms, "pace": pace, "own_binary": own_binary or {}}
    monkeypatch.setattr("llmctl.plugins.fused.decoder_layers.tactics._table", lambda: table)
