"""The plugin options for TensorRT engines: which kernels are TensorRT's and which are llmctl's.

For options without a row here, `builder.plugin_config.OPTIONS` applies. The paged form runs
llmctl's attention between TensorRT's pieces; the continuous form is one plan, in which every kernel
is TensorRT's.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.plugin_config import SWITCH, PluginOption
from llmctl.plugins.ops.paged_attention.fp8_context import GENERATION, OPTION

_NO_GEMM = (
    "our GEMM kernels are for compute capability 9.0, which TensorRT-RTX does not support; the "
    "GEMMs are TensorRT's"
)
_ONE_PLAN = "a continuous cache makes one plan, in which every kernel is TensorRT's"
_FUSED = "TensorRT fuses what it compiles by itself"
_COLLECTIVE = "sums over ranks are collectives within TensorRT's plans"
_NO_FP8_ATTENTION = "attention of TensorRT engines has 16-bit products: --backend cuda has others"
_SWIGLU = "SwiGLU is fused where GEMMs are ours: --gemm_plugin"


def tensorrt_options(backend: str, cache_type: str) -> Mapping[str, PluginOption]:
    """The options that differ for this backend and form of the KV cache."""
    rows = _continuous() if cache_type == "continuous" else _paged(backend)
    return {row.name: row for row in (*_common(), *rows)}  # a form's own row wins


def gives_gemms_to_us(plugin_config: Mapping[str, str]) -> bool:
    """Whether the linears are our kernels: then the pieces are cut at every one of them."""
    chosen = (plugin_config["gemm_plugin"], plugin_config["low_latency_gemm_plugin"])
    return any(value not in ("auto", "disable") for value in chosen)


def _common() -> tuple[PluginOption, ...]:
    return (
        _without("nccl_plugin", "auto", _COLLECTIVE),
        _without("gemm_allreduce_plugin", "disable", _COLLECTIVE),
        _without("user_buffer", "disable", _COLLECTIVE),
        _without("pp_reduce_scatter", "disable", "no rank has layers of its own"),
        _without(OPTION, "disable", _NO_FP8_ATTENTION),
        _without(GENERATION, "disable", _NO_FP8_ATTENTION),
        PluginOption(
            "norm_quant_fusion",
            "auto",
            ("auto", SWITCH[0]),
            "always on: one kernel normalizes, or multiplies, and quantizes",
            _FUSED,
            needs_fp8=("enable",),
        ),
        PluginOption(
            "gemm_swiglu_plugin", "auto", ("auto", "disable"), "TensorRT's own fusion", _SWIGLU
        ),
        PluginOption(
            "low_latency_gemm_swiglu_plugin",
            "disable",
            ("disable",),
            "TensorRT's own fusion",
            _SWIGLU,
        ),
        PluginOption(
            "multiple_profiles",
            "enable",
            SWITCH,
            "enable builds kernels for steps of few tokens and for prompt chunks apart",
        ),
    )


def _paged(backend: str) -> tuple[PluginOption, ...]:
    ours = ("fp8", "model") if backend == "tensorrt" else ()
    fp8 = ("fp8",) if backend == "tensorrt" else ()
    return (
        PluginOption(
            "gpt_attention_plugin",
            "auto",
            ("auto", "model"),
            "our paged attention, between TensorRT's plans",
            "TensorRT's own attention reads no paged cache: --kv_cache_type continuous",
        ),
        PluginOption(
            "gemm_plugin",
            "auto",
            ("auto", "disable", *ours),
            "auto and disable are TensorRT's GEMMs; a type gives the linears to our kernels",
            "GEMMs run in the model dtype, or FP8 for an FP8 checkpoint" if ours else _NO_GEMM,
            needs_fp8=("fp8",),
        ),
        PluginOption(
            "low_latency_gemm_plugin",
            "disable",
            ("disable", *fp8),
            "fp8 gives the linears to our kernels",
            "it is for FP8 linears" if fp8 else _NO_GEMM,
            needs_fp8=("fp8",),
        ),
    )


def _continuous() -> tuple[PluginOption, ...]:
    return (
        _without("gpt_attention_plugin", "auto", _ONE_PLAN),
        _without("gemm_plugin", "auto", _ONE_PLAN),
        _without("low_latency_gemm_plugin", "disable", _ONE_PLAN),
        _without("use_paged_context_fmha", "disable", "the cache is not paged"),
        _without("remove_input_padding", "disable", "batches are padded in a continuous cache"),
        PluginOption(
            "multiple_profiles",
            "enable",
            ("enable",),
            "always on: prompts, generation and verification have kernels of their own",
            "a padded batch of prompts and of single tokens have nothing in common",
        ),
    )


def _without(name: str, default: str, reason: str) -> PluginOption:
    """A row whose only meaning is that there is no such kernel of ours."""
    words = ("disable",) if default == "disable" else (default, "disable")
    return PluginOption(name, default, words, reason, reason)
