"""Requirements of engines whose attention has FP8 products: for prompts (`--use_fp8_context_fmha`),
or for all tokens (with `--use_fp8_generation_fmha`, too)."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.config import BuildConfig
from llmctl.builder.plan import KvCacheSpec
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.errors import BadConfig, LlmctlError, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.fp8_context import (
    GENERATION,
    GROUP,
    OPTION,
    Fp8Tokens,
    chosen_fp8,
    context_end,
)

_HEAD_SIZE = 128
_OFF = f"--{OPTION} disable"
_LONG_CONTEXT = 32_768  # tokens; shorter ones are not worth a note: 4 % of 8,000 (70B)


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
    BadConfig for options and limits that rule them out.
    """
    wanted = chosen_fp8(plugin_config)
    if wanted is Fp8Tokens.NONE and plugin_config[GENERATION] == "enable":
        raise BadConfig(
            f"--{GENERATION} enable is for engines whose prompts have FP8 products, too: their "
            f"arithmetic is one; --{OPTION} is {plugin_config[OPTION]}",
            fix=f"--{OPTION} enable, or --{GENERATION} disable",
        )
    off = _OFF if wanted is not Fp8Tokens.ALL else f"{_OFF} --{GENERATION} disable"
    refusal = _no_kernel(cache, off)
    for_all = refusal or _no_chains(limits)
    for_prompts = refusal or _no_groups(limits)
    if wanted is not Fp8Tokens.NONE:
        found = for_all if wanted is Fp8Tokens.ALL else for_prompts
        if found is not None:
            raise found
        return []
    could = for_prompts is None and BACKENDS[backend].packs_linears  # as what is `cuda_only`
    if OPTION in given or not could or limits.max_seq_len < _LONG_CONTEXT:
        return []
    note = (
        f"attention of prompts multiplies in 16 bits; --{OPTION} enable makes that FP8: 32,000 "
        "tokens are read in 13 % less time (70B on an H200), and texts change (docs/cuda.md)"
    )
    if limits.max_draft_len and for_all is None:
        note += f"; --{GENERATION} enable beside it makes verification of drafts FP8, too"
    return [f"{note}. disable keeps 16 bits, without this note"]


def _no_kernel(cache: KvCacheSpec, off: str) -> LlmctlError | None:
    """For a model and its cache."""
    if cache.dtype != FP8:
        return Unsupported(
            f"--{OPTION} enable multiplies keys and values as the KV cache has them, which is "
            f"{cache.dtype}; FP8 is wanted",
            fix=f"--kv-cache-dtype fp8, with a checkpoint that has KV scales, or {off}",
        )
    if cache.head_size != _HEAD_SIZE:
        return Unsupported(
            f"--{OPTION} enable has kernels for head size {_HEAD_SIZE}; this model's is "
            f"{cache.head_size}",
            fix=off,
        )
    windows = sorted({window for window in cache.windows if window})
    if windows:
        return Unsupported(
            f"--{OPTION} enable has no kernel for attention windows; this model has "
            f"{', '.join(map(str, windows))} tokens",
            fix=off,
        )
    return None


def _no_chains(limits: BuildConfig) -> LlmctlError | None:
    """For drafts of the engine's own that branch."""
    number = limits.speculative_decoding_mode
    trees = [name for name, mode in SPECULATIVE_MODES.items() if mode.drafts_trees]
    name = next((name for name in trees if SPECULATIVE_MODES[name].number == number), None)
    if name is None:
        return None
    wanted = [name for name in SPECULATIVE_MODES if name not in trees]
    return Unsupported(
        f"--{GENERATION} enable has kernels for chains of drafts; "
        f"--speculative-decoding-mode {name} verifies trees; {' or '.join(wanted)} is wanted",
        fix=f"--speculative-decoding-mode {wanted[-1]}, or --{GENERATION} disable",
    )


def _no_groups(limits: BuildConfig) -> LlmctlError | None:
    """For limits of steps that have no groups of a prompt's tokens, or do not know them."""
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
