"""What an engine needs whose prompts' attention has FP8 products (`--use_fp8_context_fmha`)."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.config import BuildConfig
from llmctl.builder.plan import KvCacheSpec
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, context_end

OPTION = "use_fp8_context_fmha"
ATTRIBUTE = "fp8_context"  # of paged_attention in plans; not written where it is false
_HEAD_SIZE = 128
_OFF = f"--{OPTION} disable"


def has_fp8_context(plugin_config: Mapping[str, str]) -> bool:
    """Whether an engine that is being built has them."""
    return plugin_config[OPTION] == "enable"


def require_fp8_context(
    plugin_config: Mapping[str, str], limits: BuildConfig, cache: KvCacheSpec
) -> None:
    """Raise Unsupported where no kernel has such products, BadConfig for limits that rule them
    out."""
    if not has_fp8_context(plugin_config):
        return
    if cache.dtype != FP8:
        raise Unsupported(
            f"--{OPTION} enable multiplies keys and values as the KV cache has them, which is "
            f"{cache.dtype}; FP8 is wanted",
            fix=f"--kv-cache-dtype fp8, with a checkpoint that has KV scales, or {_OFF}",
        )
    if cache.head_size != _HEAD_SIZE:
        raise Unsupported(
            f"--{OPTION} enable has kernels for head size {_HEAD_SIZE}; this model's is "
            f"{cache.head_size}",
            fix=_OFF,
        )
    windows = sorted({window for window in cache.windows if window})
    if windows:
        raise Unsupported(
            f"--{OPTION} enable has no kernel for attention windows; this model has "
            f"{', '.join(map(str, windows))} tokens",
            fix=_OFF,
        )
    if not context_end(limits.max_seq_len - 1):
        raise BadConfig(
            f"max_seq_len is {limits.max_seq_len}, and --{OPTION} enable is for prompts of more "
            f"than {GROUP} tokens, with room for one more",
            fix=f"--max-seq-len {GROUP + 2} or more, or {_OFF}",
        )
    # A group has to fit a step beside everybody who generates, or prompts would wait for these.
    least = GROUP + limits.max_batch_size - 1
    if limits.max_num_tokens < least:
        raise BadConfig(
            f"max_num_tokens is {limits.max_num_tokens}; --{OPTION} enable reads prompts {GROUP} "
            f"tokens at a time, beside up to {limits.max_batch_size - 1} sequences that generate",
            fix=f"--max-num-tokens {least} or more, or {_OFF}",
        )
    if limits.max_draft_len >= GROUP - 1:
        raise BadConfig(
            f"max_draft_len is {limits.max_draft_len}; with --{OPTION} enable at most {GROUP - 2} "
            "drafts are told from a prompt's tokens",
            fix=f"--max-draft-len {GROUP - 2} or less, or {_OFF}",
        )
