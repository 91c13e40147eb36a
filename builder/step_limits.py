"""The largest step of an engine: what its kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.heads.lookahead.mode import lookahead_sizes
from llmctl.builder.plan import Plan
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens


def step_limits(plan: Plan, build: Mapping[str, Any]) -> StepLimits:
    """Of a plan and `build_config` of config.json."""
    return StepLimits(
        max_num_tokens=plan.max_num_tokens,
        max_num_rows=plan.max_num_rows,
        max_batch_size=build["max_batch_size"],
        max_seq_len=build["max_seq_len"],
        max_draft_len=build["max_draft_len"],
        tokens_per_block=plan.kv_cache.tokens_per_block,
        kv_dtype=plan.kv_cache.dtype,
        lookahead=lookahead_sizes(build["speculative_decoding_mode"], build.get("draft_heads", {})),
        fp8_generation=plan.fp8_tokens is Fp8Tokens.ALL,
    )
