"""The passes in their order, from the network as recorded to the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmctl.builder.config import BuildConfig
from llmctl.builder.engine_format import KvCacheSpec, Plan
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network
from llmctl.builder.passes.attention import lower_attention
from llmctl.builder.passes.fuse import (
    fuse_embedding,
    fuse_quantize,
    fuse_residual,
    fuse_silu,
    quantize_before_gather,
)
from llmctl.builder.passes.gather import hoist_gather, mark_ends
from llmctl.builder.passes.heads import keep_whole, link_heads
from llmctl.builder.passes.lower import lower
from llmctl.builder.passes.merge import merge_linears
from llmctl.builder.passes.pack import pack_linears
from llmctl.builder.passes.quantize import LinearScales, quantize_linears
from llmctl.builder.passes.rank_heads import split_heads
from llmctl.builder.passes.ranks import (
    fuse_norms,
    keep_residuals,
    push_partial_sums,
    split_over_ranks,
)
from llmctl.builder.passes.tactics import choose_tactics
from llmctl.builder.sharding import reduce_partial_sums
from llmctl.builder.sources import RotaryTable
from llmctl.builder.tensorrt.pieces import Piece, cut
from llmctl.builder.tensorrt.plugin_options import gives_gemms_to_us
from llmctl.builder.tensorrt.whole import make_whole
from llmctl.plugins.backends.backend import BACKENDS, Backend
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, chosen_fp8


def run_passes(
    recorded: Network,
    model: ModelConfig,
    limits: BuildConfig,
    plugin_config: Mapping[str, str],
    linear_scales: Mapping[str, LinearScales],
    kv_scales: Sequence[tuple[str, str]] | None,
    cache: KvCacheSpec,
    backend: str,
    heads: Sequence[Network] = (),
) -> tuple[list[Network], Plan, tuple[Piece, ...]]:
    """(the graphs as the backend runs them, the base graph first, their plan, what of it TensorRT
    compiles). `heads` as recorded."""
    able = BACKENDS[backend]

    if limits.tp_size > 1 and able.compiles_plans:
        recorded = reduce_partial_sums(recorded)

    def fuse(graph: Network) -> Network:
        own = graph.cache  # which is not quantized
        rope, size = (own.rope, own.head_size) if own else (model.rope, model.head_size)
        rotary = RotaryTable(rope, limits.max_seq_len, size)
        scales = None if own else kv_scales
        products = Fp8Tokens.NONE if own else chosen_fp8(plugin_config)
        able_to = _quantizing_ops(plugin_config, limits), products
        fused = _fuse(graph, rotary, *able_to, linear_scales, scales, able)
        if own is not None:
            windows = (0 if window >= limits.max_seq_len else window for window in own.windows)
            fused.cache = replace(own, windows=tuple(windows))
        return fused

    network, *rewritten = map(fuse, (recorded, *heads))
    if not able.compiles_plans:
        network = split_over_ranks(
            network, limits.tp_size, limits.sum_leaves, is_packed=able.packs_linears
        )
        rewritten = split_heads(rewritten, limits.tp_size)
    if able.packs_linears:
        network = fuse_norms(mark_ends(network))
        is_fused = plugin_config["gemm_swiglu_plugin"] != "disable"
        network, *rewritten = (
            fuse_embedding(pack_linears(graph, fuse_swiglu=is_fused))
            for graph in (network, *rewritten)
        )
    pieces: tuple[Piece, ...] = ()
    if able.compiles_plans:
        assert not heads, "plans of TensorRT have no heads"
        if gives_gemms_to_us(plugin_config):
            network = pack_linears(network)
        if limits.kv_cache_type == "CONTINUOUS":
            network, pieces = make_whole(network, cache, limits)
        else:
            network, pieces = cut(network, limits.tp_size)
    network, *chosen = [choose_tactics(graph, backend) for graph in (network, *rewritten)]
    network = push_partial_sums(keep_residuals(network))
    if limits.tp_size > 1:
        chosen = [keep_whole(network, head) for head in chosen]
    linked = link_heads(network, chosen)
    sizes = (limits.max_num_tokens, limits.max_num_rows, able.arena_alignment)
    plan = lower(network, cache, *sizes, linked, limits.max_batch_size, limits.max_num_beams)
    return [network, *linked], plan, pieces


def _fuse(
    recorded: Network,
    rotary: RotaryTable,
    quantizing: frozenset[str],
    products: Fp8Tokens,
    linear_scales: Mapping[str, LinearScales],
    kv_scales: Sequence[tuple[str, str]] | None,
    able: Backend,
) -> Network:
    """One graph in operators of ours. quantizing: those that may write FP8 themselves; products:
    whose attention has FP8 products."""
    network = merge_linears(recorded)
    network = fuse_silu(network)
    network = hoist_gather(network)
    network = fuse_residual(network)
    network = quantize_linears(network, linear_scales)
    network = lower_attention(network, rotary, kv_scales, fp8_tokens=products)
    if able.gathers_fp8:
        network = quantize_before_gather(network)
    return fuse_quantize(network, quantizing)


def _quantizing_ops(plugin_config: Mapping[str, str], limits: BuildConfig) -> frozenset[str]:
    """Which ops may write FP8 themselves."""
    if plugin_config["norm_quant_fusion"] != "enable":
        return frozenset()
    ops = {"rms_norm", "swiglu", "paged_attention"}
    if limits.kv_cache_type == "CONTINUOUS":  # attention is TensorRT's, which writes 16 bits
        ops.remove("paged_attention")
    return frozenset(ops)
