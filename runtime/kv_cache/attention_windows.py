"""Attention windows requested when an engine is opened, in addition to those of its model.

Kernels of the cpu and cuda backends take windows as arguments, so a plan can be given narrower
ones. TensorRT plans are compiled for the windows of the checkpoint; other windows are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmctl.builder.engine_format import KvCacheSpec, Plan, PlanGraph, PlanOp
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types
from llmctl.runtime.kv_cache import AttentionWindow, common_window


@refused.refuses()
@dataclass(frozen=True, slots=True)
class WindowOptions:
    """`sizes` in tokens, one per layer and repeated over the layers; empty: those of the model.
    `sink_tokens`: the first tokens, which stay visible in every window and count towards its
    size."""

    sizes: tuple[int, ...] = ()
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        check_types(self, checks_integers=True)
        for size in self.sizes:
            if size < 2:
                raise BadConfig(
                    f"--max-attention-window-size has {size}; sizes are at least 2 tokens, as a "
                    "token that attends to itself alone knows nothing of the prompt",
                    fix="leave it out for the model's own windows",
                )
        if self.sink_tokens < 0:
            raise BadConfig(f"--sink-token-length is {self.sink_tokens}; it must be at least 0")


def apply_windows(plan: Plan, options: WindowOptions, max_seq_len: int, backend: str) -> Plan:
    """The plan with each layer's window reduced to the requested size; the same plan if none is.

    Raises BadConfig for more sinks than a window holds, Unsupported on a backend without this.
    """
    cache = plan.kv_cache
    windows = tuple(
        _narrowest((model, _at(options.sizes, layer)), max_seq_len)
        for layer, model in enumerate(cache.windows)
    )
    if options.sink_tokens:
        _require_room_for_sinks(windows, options.sink_tokens)
    if windows == cache.windows and not options.sink_tokens:
        return plan
    if not BACKENDS[backend].has_windows_at_run_time:
        raise Unsupported(
            f"--max-attention-window-size and --sink-token-length change how kernels attend; those "
            f"of backend {backend!r} are compiled for the checkpoint's windows "
            f"({_describe(cache.windows)})",
            fix="leave them out, or rebuild with: llmctl build --backend cuda (or cpu)",
        )
    if plan.fp8_tokens is not Fp8Tokens.NONE:
        raise Unsupported(
            "--max-attention-window-size and --sink-token-length change how kernels attend; those "
            "of this engine with FP8 products see all tokens",
            fix="leave them out, or rebuild with: llmctl build --use_fp8_context_fmha disable",
        )
    ops = tuple(_with_window(op, windows, options.sink_tokens) for op in plan.ops)
    caches, heads = _narrowed_heads(plan, windows, options.sink_tokens, max_seq_len)
    # The kernel that computes whole layers in one launch does not support requested windows.
    return replace(
        plan,
        ops=ops,
        kv_cache=replace(cache, windows=windows),
        fused=(),
        heads=heads,
        head_caches=caches,
    )


def _narrowed_heads(
    plan: Plan, windows: Sequence[int], sink_tokens: int, max_seq_len: int
) -> tuple[dict[str, KvCacheSpec], dict[str, PlanGraph]]:
    """The caches of heads, which see no further than the widest of the windows, and the heads."""
    widest = max(windows) if all(windows) else 0
    caches = {
        name: replace(
            cache,
            windows=tuple(_narrowest((own, widest), max_seq_len) for own in cache.windows),
        )
        for name, cache in plan.head_caches.items()
    }
    heads = {}
    for name, head in plan.heads.items():
        own = caches[head.cache].windows if head.cache else ()
        ops = tuple(_with_window(op, own, sink_tokens) for op in head.ops)
        heads[name] = replace(head, ops=ops)
    return caches, heads


def cache_window(
    plans: Sequence[Plan], options: WindowOptions, max_seq_len: int
) -> AttentionWindow | None:
    """The window outside of which the KV cache may drop blocks, for engines that run together;
    None: it must keep all.

    Raises BadConfig for more sizes than any engine has layers.
    """
    num_layers = max(len(plan.kv_cache.windows) for plan in plans)
    if len(options.sizes) > num_layers:
        raise BadConfig(
            f"--max-attention-window-size has {len(options.sizes)} sizes; there are {num_layers} "
            "layers"
        )
    if any(plan.kv_cache.tokens_per_block >= max_seq_len for plan in plans):
        return None  # a block that holds a whole sequence is never outside a window
    windows = [cache.windows for plan in plans for cache in plan.caches.values()]
    return common_window(windows, options.sink_tokens)


def what_windows_save(plans: Sequence[Plan], window: AttentionWindow | None) -> str | None:
    """How far windows limit the KV cache, as text; None if no layer has a window.

    All layers of all engines share one block table per sequence, so the widest window decides.
    """
    windows = [s for plan in plans for cache in plan.caches.values() for s in cache.windows]
    num_full = windows.count(0)
    if num_full == len(windows):
        return None
    if window is not None:
        return f"KV cache: rings of blocks for the last {window.size} tokens of a sequence"
    if not num_full:
        return "KV cache: whole sequences, as one block holds one"
    return (
        f"KV cache: whole sequences in all layers, as {num_full} of {len(windows)} layers see "
        "them; windows elsewhere save time, no memory"
    )


def _with_window(op: PlanOp, windows: Sequence[int], sink_tokens: int) -> PlanOp:
    if op.op != "paged_attention":
        return op
    window = windows[int(op.attributes["layer"])]
    attributes = {**op.attributes, "window": window}
    if window:
        attributes["sink_tokens"] = sink_tokens
    return replace(op, attributes=attributes)


def _at(sizes: Sequence[int], layer: int) -> int:
    return sizes[layer % len(sizes)] if sizes else 0


def _narrowest(sizes: Iterable[int], max_seq_len: int) -> int:
    """The smallest window; 0 for full attention."""
    return min((size for size in sizes if 0 < size < max_seq_len), default=0)


def _require_room_for_sinks(windows: Sequence[int], sink_tokens: int) -> None:
    least = min((window for window in windows if window), default=0)
    if not least:
        raise BadConfig(
            f"--sink-token-length is {sink_tokens}, and every layer sees the whole sequence",
            fix="add --max-attention-window-size",
        )
    if sink_tokens >= least:
        raise BadConfig(
            f"--sink-token-length is {sink_tokens}; a window of {least} tokens leaves no room for "
            "others"
        )


def _describe(windows: Sequence[int]) -> str:
    return ", ".join(str(size or "all") for size in sorted(set(windows)))
