"""What an engine needs whose prompts' attention has FP8 products (`--use_fp8_context_fmha`)."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.config import BuildConfig
from llmctl.builder.plan import KvCacheSpec
from llmctl.errors import BadConfig, LlmctlError, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, context_end

OPTION = "use_fp8_context_fmha"
ATTRIBUTE = "fp8_context"  # of paged_attention in plans; not written where it is false
_HEAD_SIZE = 128
_OFF = f"--{OPTION} disable"
_LONG_CONTEXT = 32_768  # tokens; shorter ones are not worth a note: 4 % of 8,000 (70B)


def has_fp8_context(plugin_config: Mapping[str, str]) -> bool:
    """Whether an engine that is being built has them."""
    return plugin_config[OPTION] == "enable"


def fp8_context_notices(
    given: Mapping[str, str],
    plugin_config: Mapping[str, str],
    backend: str,
    limits: BuildConfig,
    cache: KvCacheSpec,
) -> list[str]:
    """What people should know of an engine for long prompts that could have them, where nobody said
    whether it should. given: plugin options by name.

    Raises, of an engine that is to have them, Unsupported where no kernel has such products, and
    BadConfig for limits that rule them out.
    """
    refusal = _refusal(limits, cache)
    if has_fp8_context(plugin_config):
        if refusal is not None:
            raise refusal
        return []
    could = refusal is None and BACKENDS[backend].packs_linears  # as what is `cuda_only`
    if OPTION in given or not could or limits.max_seq_len < _LONG_CONTEXT:
        return []
    return [
        f"attention of prompts multiplies in 16 bits; --{OPTION} enable makes that FP8: 32,000 "
        "tokens are read in 13 % less time (70B on an H200), and texts change (docs/cuda.md). "
        "disable keeps 16 bits, without this note"
    ]


def _refusal(limits: BuildConfig, cache: KvCacheSpec) -> LlmctlError | None:
    if cache.dtype != FP8:
        return Unsupported(
            f"--{OPTION} enable multiplies keys and values as the KV cache has them, which is "
            f"{cache.dtype}; FP8 is wanted",
            fix=f"--kv-cache-dtype fp8, with a checkpoint that has KV scales, or {_OFF}",
        )
    if cache.head_size != _HEAD_SIZE:
        return Unsupported(
            f"--{OPTION} enable has kernels for head size {_HEAD_SIZE}; this model's is "
            f"{cache.head_size}",
            fix=_OFF,
        )
    windows = sorted({window for window in cache.windows if window})
    if windows:
        return Unsupported(
            f"--{OPTION} enable has no kernel for attention windows; this model has "
            f"{', '.join(map(str, windows))} tokens",
            fix=_OFF,
        )
    if not context_end(limits.max_seq_len - 1):
        return BadConfig(
            f"max_seq_len is {limits.max_seq_len}, and --{OPTION} enable is for prompts of more "
            f"than {GROUP} tokens, with room for one more",
            fix=f"--max-seq-len {GROUP + 2} or more, or {_OFF}",
        )
    # A group has to fit a step beside everybody who generates, or prompts would wait for these.
    least = GROUP + limits.max_batch_size - 1
    if limits.max_num_tokens < least:
        return BadConfig(
            f"max_num_tokens is {limits.max_num_tokens}; --{OPTION} enable reads prompts {GROUP} "
            f"tokens at a time, beside up to {limits.max_batch_size - 1} sequences that generate",
            fix=f"--max-num-tokens {least} or more, or {_OFF}",
        )
    if limits.max_draft_len >= GROUP - 1:
        return BadConfig(
            f"max_draft_len is {limits.max_draft_len}; with --{OPTION} enable at most {GROUP - 2} "
            "drafts are told from a prompt's tokens",
            fix=f"--max-draft-len {GROUP - 2} or less, or {_OFF}",
        )
    return None
