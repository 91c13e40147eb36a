"""Which linears of a checkpoint are FP8, where their scales are, and the KV cache's scales.

Reads checkpoints of ModelOpt (MXFP4 weights among them), compressed-tensors (llm-compressor) and
AutoFP8. What the config claims and what the headers hold must agree: a weight that should be FP8
and is not, or the other way round, is refused, because running it would give fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmctl.builder.models.decoder import EMBEDDING, LM_HEAD
from llmctl.builder.mxfp4 import MXFP4_ALGO
from llmctl.builder.network import Network
from llmctl.builder.passes.quantize import LinearScales
from llmctl.builder.sharding import Shard
from llmctl.builder.sources import LargestScale, Rows, RowScales, Source
from llmctl.errors import (
    BadTensorShape,
    MissingTensor,
    UnexpectedTensor,
    UnknownQuantization,
    Unsupported,
)
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo
from llmctl.quantize.format import MXFP4_BLOCK, QuantizationInfo, clipped

READ_SCHEMES = (
    "ModelOpt FP8, FP8_PER_CHANNEL_PER_TOKEN and W4A8_MXFP4_FP8, compressed-tensors FP8 (tensor or "
    "channel weights, static or dynamic token activations), AutoFP8"
)
_FLOATS = ("F32", "BF16", "F16")

# Spellings of the K and V cache scales under `...self_attn`, newest first (ModelOpt,
# compressed-tensors, llm-compressor of 2024, AutoFP8 with one scale for both).
_KV_SPELLINGS = (
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_scale", "v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
# An unread tensor with one of these endings would change what the model computes.
_MEANINGFUL = (
    "_scale",
    "_scale_2",
    "_scale_inv",
    "_zero_point",
    "_bias",
    "weight_packed",
    "g_idx",
    "qweight",
    "qzeros",
)


def find_linear_scales(checkpoint: Checkpoint, network: Network) -> dict[str, LinearScales]:
    """The FP8 and MXFP4 linears of the network as recorded (before merging), by module name.

    Absent weights are left to `Checkpoint.require`, which names all of them. Raises
    UnknownQuantization (quantized weights that no config explains), MissingTensor (a scale) or
    BadTensorShape.
    """
    info = checkpoint.quantization
    scales = {}
    for node in network.nodes:
        if node.op != "linear":
            continue
        source = network.sources[node.inputs["weight"]]
        assert isinstance(source, Rows)
        (weight,) = source.names
        module = weight.removesuffix(".weight")
        if weight in checkpoint.tensors and _is_quantized(checkpoint.info(weight), info, module):
            assert info is not None
            scales[module] = _scales_of(checkpoint, info, module)
    _require_floats(checkpoint, network, scales)
    return scales


def _require_floats(
    checkpoint: Checkpoint, network: Network, scales: Mapping[str, LinearScales]
) -> None:
    """Raises BadTensorShape for integers where weights that are not quantized should be: they
    would be taken for numbers of the same size."""
    quantized = {f"{module}.weight" for module in scales}
    sources = [source for source in network.sources.values() if isinstance(source, Rows)]
    for name in (name for source in sources for name in source.names):
        found = checkpoint.tensors.get(name)
        if found is not None and name not in quantized and found.dtype not in _FLOATS:
            raise BadTensorShape(
                f"{name} in {found.file} is {found.dtype}; {', '.join(_FLOATS)} are read"
            )


def require_readable(checkpoint: Checkpoint) -> None:
    """Refuse a quantization llmctl does not build, before its tensors are found to be odd.

    Raises UnknownQuantization.
    """
    info = checkpoint.quantization
    if info is None:
        return
    is_readable = info.algo is None or (
        info.algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", MXFP4_ALGO)
        and info.activations in ("static", "dynamic")
    )
    if not is_readable or info.kv_cache_algo not in (None, "FP8", "INT8"):
        found = str(info.algo) if not is_readable else f"a KV cache in {info.kv_cache_algo}"
        activations = "" if is_readable else f" with {clipped(str(info.activations))} activations"
        raise UnknownQuantization(
            f"{checkpoint.path} is quantized by {info.method} as {clipped(found)}{activations}; "
            f"this version builds {READ_SCHEMES}, with an FP8, INT8 or unquantized KV cache",
        )


def require_weights(info: QuantizationInfo | None, backend: str) -> None:
    """Raise Unsupported where a backend has no product of these weights."""
    if info is not None and info.algo == MXFP4_ALGO and not BACKENDS[backend].has_block_scales:
        raise Unsupported(
            f"weights in {info.algo} are refused: the {backend} backend has no product of them",
            fix="--backend cuda, or a checkpoint of `llmctl quantize --qformat fp8`",
        )


def _is_quantized(weight: TensorInfo, info: QuantizationInfo | None, module: str) -> bool:
    wanted = "U8" if info is not None and info.algo == MXFP4_ALGO else "F8_E4M3"
    is_stored = weight.dtype in ("F8_E4M3", "U8")
    is_declared = _is_declared(info, module)
    if is_stored == is_declared and (not is_stored or weight.dtype == wanted):
        return is_stored
    if info is None:
        raise UnknownQuantization(
            f"{weight.name} in {weight.file} is {weight.dtype}, but neither config.json nor "
            "hf_quant_config.json describes a quantization",
            fix="fetch the config files again",
        )
    says = f"declares {info.algo} as" if is_declared else "excludes it from"
    raise BadTensorShape(
        f"{weight.name} in {weight.file} is {weight.dtype}, but the config {says} the quantization",
        fix="correct the list of excluded modules, or export the checkpoint again",
    )


def _is_declared(info: QuantizationInfo | None, module: str) -> bool:
    if info is None or info.algo is None:
        return False
    # A tied head reads the embedding's tensor; exporters exclude it under either name.
    names = (module, LM_HEAD) if module == EMBEDDING else (module,)
    return not any(info.excludes(name) for name in names)


def _scales_of(checkpoint: Checkpoint, info: QuantizationInfo, module: str) -> LinearScales:
    names = [f"{module}.weight_scale"]
    if info.activations == "static":
        names.append(f"{module}.input_scale")
    absent = [name for name in names if name not in checkpoint.tensors]
    if absent:
        reason = (
            "it was exported without calibration" if "input" in absent[0] else "it is incomplete"
        )
        raise MissingTensor(
            f"{checkpoint.path} declares {info.algo} by {info.method} but lacks {absent[0]}; "
            f"probably {reason}",
            fix="quantize again with calibration data, or fetch the checkpoint again",
        )
    is_mxfp4 = info.algo == MXFP4_ALGO
    scale = checkpoint.info(names[0])
    if is_mxfp4 and scale.dtype != "U8":
        raise BadTensorShape(
            f"{scale.name} in {scale.file} is {scale.dtype}; {info.algo} has powers of two as U8 "
            "(E8M0: 127 is 1)",
            fix="quantize again with `llmctl quantize --qformat w4a8_mxfp4_fp8`",
        )
    return LinearScales(names[0], names[1] if len(names) > 1 else None, is_mxfp4)


def find_kv_scales(checkpoint: Checkpoint, num_layers: int) -> list[tuple[str, str]]:
    """The names of the K and V cache scales of every layer, in one of the known spellings.

    Raises MissingTensor: a cache without scales would silently run with 1.0.
    """
    found = []
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        pairs = [(f"{prefix}.{k}", f"{prefix}.{v}") for k, v in _KV_SPELLINGS]
        pair = next((p for p in pairs if all(name in checkpoint.tensors for name in p)), None)
        if pair is None:
            raise MissingTensor(
                f"{checkpoint.path} has no KV cache scales for layer {layer} "
                f"({pairs[0][0]} or one of {len(pairs) - 1} other spellings); probably its "
                "exporter did not calibrate the KV cache",
                fix="build with --kv-cache-dtype none, or quantize again with calibration data; "
                "--kv-cache-unit-scales takes 1.0 for all (FP8)",
            )
        found.append(pair)
    return found


def check_unused(checkpoint: Checkpoint, used: Iterable[str], num_layers: int) -> list[str]:
    """Checkpoint tensors the engine does not read, known harmless ones left out.

    Raises UnknownQuantization for one that would change the result (a scale or bias of a scheme
    llmctl does not know), UnexpectedTensor for the bias of a linear that has none by its config.
    """
    harmless = set(used) | {"lm_head.weight"}  # a tied model may carry the copy
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        harmless |= {f"{prefix}.{name}" for pair in _KV_SPELLINGS for name in pair}
        harmless.add(f"{prefix}.rotary_emb.inv_freq")
    info = checkpoint.quantization
    unused = [name for name in checkpoint.tensors if name not in harmless]
    for name in unused:
        is_spare_input = name.endswith(".input_scale") and info and info.activations == "dynamic"
        if name.endswith(_MEANINGFUL) and not is_spare_input:
            raise UnknownQuantization(
                f"{checkpoint.path} holds {name}, which llmctl does not know; leaving it out "
                "would change the model's results",
                fix=f"use a checkpoint that is one of: {READ_SCHEMES}",
            )
    for name in unused:
        if name.endswith(".bias") and name.removesuffix("bias") + "weight" in harmless:
            raise UnexpectedTensor(
                f"{checkpoint.path} holds {name}, a bias that its config.json does not imply; "
                "leaving it out would change the model's results",
                fix="check that config.json belongs to these weights",
            )
    return unused


def checkpoint_shapes(
    network: Network, info: QuantizationInfo | None
) -> Mapping[str, tuple[int, ...]]:
    """The shape of every checkpoint tensor that the network as recorded reads, MXFP4's included."""
    sources = [source for source in network.sources.values() if isinstance(source, Rows)]
    shapes = {name: shape for source in sources for name, shape in source.parts}
    if info is None or info.algo != MXFP4_ALGO:
        return shapes
    for node in network.nodes:
        weight = node.inputs.get("weight", "")
        if node.op != "linear" or not _is_declared(info, weight.removesuffix(".weight")):
            continue
        rows, inner = shapes[weight]
        if inner % MXFP4_BLOCK:
            raise BadTensorShape(
                f"{weight} has {inner} columns by config.json; {info.algo} has blocks of "
                f"{MXFP4_BLOCK}",
                fix="exclude this module from the quantization",
            )
        shapes[weight] = (rows, inner // 2)
        shapes[f"{weight}_scale"] = (rows, inner // MXFP4_BLOCK)
    return shapes


def read_scales(checkpoint: Checkpoint, sources: Mapping[str, Source], num_ranks: int) -> None:
    """Read every scale once, so a bad one is named before anything is written."""
    for source in sources.values():
        if isinstance(source, LargestScale | RowScales):
            for rank in range(num_ranks):
                for _ in source.chunks(Shard(checkpoint, rank, num_ranks)):
                    pass
    checkpoint.release()
