"""TensorRT-LLM's plugin options as one table: values, effect, limits.

Each option either changes the engine or has exactly one meaning here; a value that this backend
cannot honour is refused with the reason, never ignored. Resolved values are stored in config.json
under `plugin_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmctl.builder.network import Network
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.fused.all_reduce_norm.spec import MAX_PARTS, PART
from llmctl.plugins.ops.paged_attention.fp8_context import GENERATION, OPTION

SWITCH = ("enable", "disable")
MODEL_DTYPES = ("float16", "float32", "bfloat16")
FP8_ONLY = ("fp8", "disable")


@dataclass(frozen=True, slots=True)
class PluginOption:
    """One `--<name>`. `values` are all values that TensorRT-LLM has, `accepted` those that work
    here.

    "model" in `accepted` stands for the engine's own dtype. `needs_fp8` values are accepted only
    for an FP8 checkpoint, `cuda_only` values by the cuda backend; `elsewhere` says why not by the
    cpu's. `reason` completes "<value> is refused: ...", and so does it.
    """

    name: str
    default: str
    accepted: tuple[str, ...]
    effect: str
    reason: str = ""
    needs_fp8: tuple[str, ...] = ()
    cuda_only: tuple[str, ...] = ()
    elsewhere: str = "the cpu backend has no kernel that fuses this GEMM with SwiGLU"


def _no_such_part(name: str, part: str, *accepted: str) -> PluginOption:
    return PluginOption(name, accepted[0], accepted, f"no effect: {part}", part)


_OWN_SUMS = (
    "sums over ranks are kernels of our own, in buffers of their own (docs/tensor_parallel.md)"
)
_NO_PIPELINE = "no rank has layers of its own"
_SINKS = "sink tokens and windows are options of run (docs/cli.md)"
_NO_LORA = "LoRA is not in this version"
_NO_FP8_ATTENTION = "the cpu backend has no kernel with FP8 products for attention"

OPTIONS: Mapping[str, PluginOption] = {
    option.name: option
    for option in (
        PluginOption(
            "gpt_attention_plugin",
            "auto",
            ("auto", "model"),
            "paged attention in the model dtype; always on",
            "paged attention is the only attention there is, and it runs in the model dtype",
        ),
        PluginOption(
            "gemm_plugin",
            "auto",
            ("auto", "disable", "model", "fp8"),
            "GEMM kernels; fp8 asserts that the linears are FP8, the other values name the same "
            "built-in kernels",
            "GEMMs run in the model dtype, or FP8 for an FP8 checkpoint",
            needs_fp8=("fp8",),
        ),
        PluginOption(
            "low_latency_gemm_plugin",
            "disable",
            FP8_ONLY,
            "fp8 asserts that the linears are FP8; the same kernels serve small and large batches",
            "it is for FP8 linears",
            needs_fp8=("fp8",),
        ),
        PluginOption(
            "fp8_rowwise_gemm_plugin",
            "auto",
            ("auto", "disable", "model"),
            "per-row weight scales are always applied per row",
            "the output is in the model dtype",
        ),
        PluginOption(
            "gemm_swiglu_plugin",
            "auto",
            ("auto", *FP8_ONLY),
            "cuda backend: auto computes SwiGLU in the epilogue of its GEMM, fp8 also asserts that "
            "the linears are FP8, disable keeps them apart (same values)",
            "it is for FP8 linears",
            needs_fp8=("fp8",),
            cuda_only=("fp8",),
        ),
        PluginOption(
            "low_latency_gemm_swiglu_plugin",
            "disable",
            FP8_ONLY,
            "cuda backend: fp8 asserts that the linears are FP8; gemm_swiglu_plugin serves small "
            "batches too",
            "it is for FP8 linears",
            needs_fp8=("fp8",),
            cuda_only=("fp8",),
        ),
        PluginOption(
            "context_fmha",
            "enable",
            ("enable",),
            "prompt attention is always fused: no score matrix is stored",
            "there is no unfused attention to fall back to",
        ),
        PluginOption(
            "use_paged_context_fmha",
            "enable",
            ("enable",),
            "prompt attention always reads the paged cache",
            "block reuse, chunked prefill and verification of drafts need it",
        ),
        PluginOption(
            OPTION,
            "disable",
            SWITCH,
            "cuda backend: enable computes prompts' attention with FP8 products, which is faster "
            "and gives other text (docs/cuda.md); generation and the last tokens of a prompt keep "
            f"16 bits, unless {GENERATION} is enable",
            "it is enable or disable",
            cuda_only=("enable",),
            elsewhere=_NO_FP8_ATTENTION,
        ),
        PluginOption(
            GENERATION,
            "disable",
            SWITCH,
            f"cuda backend: with {OPTION} enable, enable computes attention of every token with "
            "FP8 products, so verifications in long contexts are faster, too (docs/cuda.md)",
            "it is enable or disable",
            cuda_only=("enable",),
            elsewhere=_NO_FP8_ATTENTION,
        ),
        PluginOption(
            "norm_quant_fusion",
            "auto",
            ("auto", *SWITCH),
            "enable fuses RMSNorm, SwiGLU and attention with the FP8 quantization that follows, "
            "disable keeps them apart (same values); auto is enable for FP8 checkpoints",
            "the checkpoint has no FP8 linears",
            needs_fp8=("enable",),
        ),
        PluginOption(
            "remove_input_padding",
            "enable",
            ("enable",),
            "batches are always packed",
            "there is no padded form",
        ),
        PluginOption(
            "use_fused_mlp",
            "enable",
            ("enable",),
            "gate and up are always one GEMM",
            "SwiGLU reads the merged gate and up",
        ),
        PluginOption(
            "multiple_profiles",
            "enable",
            ("enable",),
            "kernels always choose their tiles by the number of tokens in the step",
            "there is no single-profile form",
        ),
        PluginOption(
            "reduce_fusion",
            "disable",
            ("disable", "enable"),
            "cuda backend: a sum over ranks and the norm after it are one kernel where that kernel "
            "supports the row length; enable asserts that all are (same values)",
            "it is enable or disable",
        ),
        _no_such_part("user_buffer", _OWN_SUMS, "disable"),
        _no_such_part("gemm_allreduce_plugin", _OWN_SUMS, "disable"),
        _no_such_part("pp_reduce_scatter", _NO_PIPELINE, "disable"),
        _no_such_part("nccl_plugin", _OWN_SUMS, "auto", "disable"),
        _no_such_part("lora_plugin", _NO_LORA, "disable"),
        _no_such_part("dora_plugin", _NO_LORA, "disable"),
        _no_such_part("bert_attention_plugin", "no encoder is in these models", "auto", "disable"),
        _no_such_part("moe_plugin", "no experts are in these models", "auto", "disable"),
        _no_such_part(
            "mamba_conv1d_plugin", "no recurrent layer is in these models", "auto", "disable"
        ),
        _no_such_part("paged_state", "no recurrent layer is in these models", "enable"),
        _no_such_part("streamingllm", _SINKS, "disable"),
        _no_such_part("fuse_fp4_quant", "FP4 is not in this version", "disable"),
    )
}


def options_for(backend: str, cache_type: str) -> Mapping[str, PluginOption]:
    """The table as it holds for a backend and a form of the KV cache."""
    if not BACKENDS[backend].compiles_plans:
        return OPTIONS
    from llmctl.builder.tensorrt.plugin_options import tensorrt_options

    return {**OPTIONS, **tensorrt_options(backend, cache_type)}


def sum_notices(
    plugin_config: Mapping[str, str], tp_size: int, graphs: Sequence[Network]
) -> list[str]:
    """What people should know of reduce_fusion in an engine of `tp_size` ranks, whose final graphs
    these are. Raises Unsupported where it asserts a fusion that some sum does not have."""
    if plugin_config["reduce_fusion"] != "enable":
        return []
    if tp_size == 1:
        return ["reduce_fusion enable: the engine has one rank, so there is nothing to fuse"]
    apart = [
        (node.name, graph.tensors[node.outputs["out"]].shape[-1])
        for graph in graphs
        for node in graph.nodes
        if node.op == "all_reduce"
    ]
    if not apart:
        return []
    name, width = apart[0]
    raise Unsupported(
        f"--reduce_fusion enable is refused: {len(apart)} sums over {tp_size} ranks, the first of "
        f"them {name} with rows of {width}, have no kernel that also normalizes; the cuda "
        f"backend has one for rows of multiples of {PART} up to {PART * MAX_PARTS} without scales "
        "per token",
        fix="--reduce_fusion disable",
    )


def resolve_plugins(
    given: Mapping[str, str], dtype: str, is_fp8: bool, backend: str, cache_type: str = "paged"
) -> dict[str, str]:
    """The plugin_config of an engine: every option with the value in force.

    Raises BadConfig for an unknown option, Unsupported for a value that cannot be honoured.
    """
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise BadConfig(f"{unknown[0]} is not a plugin option; known: {', '.join(sorted(OPTIONS))}")
    resolved = {"dtype": dtype}
    for option in options_for(backend, cache_type).values():
        value = given.get(option.name, option.default)
        names = [dtype if word == "model" else word for word in option.accepted]
        foreign = () if BACKENDS[backend].packs_linears else option.cuda_only
        names = [name for name in names if name not in foreign]
        is_refused = value in option.needs_fp8 and not is_fp8
        if value not in names or is_refused:
            words = [n for n in names if is_fp8 or n not in option.needs_fp8]
            reason = "the checkpoint has no FP8 linears" if is_refused else option.reason
            reason = option.elsewhere if value in foreign else reason
            raise Unsupported(
                f"--{option.name} {value} is refused: {reason}; accepted here: {', '.join(words)}",
                fix=f"--{option.name} {words[0]}",
            )
        if option.default == "auto" and SWITCH[0] in option.accepted and value == "auto":
            value = "enable" if is_fp8 else "disable"
        resolved[option.name] = value
    return resolved
