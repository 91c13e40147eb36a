"""Which linears of a checkpoint are quantized, where their scales are, and the KV cache's scales.

Reads checkpoints of ModelOpt, compressed-tensors (llm-compressor) and AutoFP8. What the config
claims and what the headers hold must agree: a weight that should be quantized and is not, or the
other way round, is refused, because running it would give fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmctl.builder.models.decoder import EMBEDDING, LM_HEAD
from llmctl.builder.network import Network
from llmctl.builder.passes.quantize import LinearScales
from llmctl.builder.sharding import RowShard, Shard
from llmctl.builder.sources import LargestScale, Rows, RowScales, Source
from llmctl.errors import (
    BadTensorShape,
    MissingTensor,
    UnexpectedTensor,
    UnknownQuantization,
    Unsupported,
)
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import quantized_schemes
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo
from llmctl.quantize.format import QuantizationInfo, clipped

*_MOST, _LAST = (known.name for scheme in quantized_schemes() for known in scheme.algorithms)
READ_SCHEMES = (
    f"ModelOpt {', '.join(_MOST)} and {_LAST}, compressed-tensors FP8 (tensor or channel weights, "
    "static or dynamic token activations), AutoFP8"
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
    """The quantized linears of the network as recorded (before merging), by module name.

    Absent weights are left to `Checkpoint.require`, which names all of them. Raises
    UnknownQuantization (quantized weights that no config explains), MissingTensor (a scale) or
    BadTensorShape.
    """
    scales = {}
    for node in network.nodes:
        if node.op != "linear":
            continue
        source = network.sources[node.inputs["weight"]]
        assert isinstance(source, Rows)
        (weight,) = source.names
        module = weight.removesuffix(".weight")
        info = checkpoint.quantization_of(module)
        if weight in checkpoint.tensors and _is_quantized(checkpoint.info(weight), info, module):
            assert info is not None and info.scheme is not None
            scales[module] = _scales_of(checkpoint, info, info.scheme, module)
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
    for info in (checkpoint.quantization, *checkpoint.apart.values()):
        if info is not None:
            _require_known(checkpoint, info)


def _require_known(checkpoint: Checkpoint, info: QuantizationInfo) -> None:
    scheme = info.scheme
    is_readable = info.algo is None or (
        scheme is not None and info.activations in scheme.activations
    )
    if not is_readable or info.kv_cache_algo not in (None, "FP8", "INT8"):
        found = str(info.algo) if not is_readable else f"a KV cache in {info.kv_cache_algo}"
        activations = "" if is_readable else f" with {clipped(str(info.activations))} activations"
        raise UnknownQuantization(
            f"{checkpoint.path} is quantized by {info.method} as {clipped(found)}{activations}; "
            f"this version builds {READ_SCHEMES}, with an FP8, INT8 or unquantized KV cache",
        )


def require_weights(checkpoint: Checkpoint, backend: str) -> None:
    """Raise Unsupported where a backend has no product of these weights."""
    for info in (checkpoint.quantization, *checkpoint.apart.values()):
        scheme = None if info is None else info.scheme
        if scheme is not None and scheme.name not in BACKENDS[backend].weight_schemes:
            assert info is not None
            raise Unsupported(
                f"weights in {info.algo} are refused: the {backend} backend has no product of them",
                fix="--backend cuda, or a checkpoint of `llmctl quantize --qformat fp8`",
            )


def _is_quantized(weight: TensorInfo, info: QuantizationInfo | None, module: str) -> bool:
    is_stored = weight.dtype in {scheme.storage.dtype for scheme in quantized_schemes()}
    is_declared = _is_declared(info, module)
    if not is_stored and not is_declared:
        return False
    scheme = None if info is None else info.scheme
    if is_declared and scheme is not None and weight.dtype == scheme.storage.dtype:
        return True
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


def _scales_of(
    checkpoint: Checkpoint, info: QuantizationInfo, scheme: QuantizedScheme, module: str
) -> LinearScales:
    names = [f"{module}.weight_scale"]
    if info.activations == "static":
        names.append(f"{module}.input_scale")
    absent = [name for name in names if name not in checkpoint.tensors]
    inverse = checkpoint.tensors.get(f"{module}.weight_scale_inv")
    if inverse is not None:  # weight_block_size is absent or null: AutoFP8's, or transformers'
        raise UnknownQuantization(
            f"{inverse.file} holds {inverse.name} {list(inverse.shape)}: {info.method} with the "
            "tensors of transformers' FineGrainedFP8, in blocks of 128x128 unless its "
            f"weight_block_size says otherwise; this version builds {READ_SCHEMES}"
        )
    if absent:
        reason = (
            "it was exported without calibration" if "input" in absent[0] else "it is incomplete"
        )
        raise MissingTensor(
            f"{checkpoint.path} declares {info.algo} by {info.method} but lacks {absent[0]}; "
            f"probably {reason}",
            fix="quantize again with calibration data, or fetch the checkpoint again",
        )
    scale, storage = checkpoint.info(names[0]), scheme.storage
    if storage.block is not None and scale.dtype != storage.scale_dtype:
        raise BadTensorShape(
            f"{scale.name} in {scale.file} is {scale.dtype}; {info.algo} has {storage.scale_text}",
            fix=f"quantize again with `llmctl quantize --qformat {scheme.qformat}`",
        )
    return LinearScales(names[0], names[1] if len(names) > 1 else None, scheme)


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
    unused = [name for name in checkpoint.tensors if name not in harmless]
    for name in unused:
        info = checkpoint.quantization_of(name)
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
    network: Network, checkpoint: Checkpoint | None
) -> Mapping[str, tuple[int, ...]]:
    """The shape of every checkpoint tensor that the network as recorded reads, scales of blocks
    included. Without a checkpoint nothing is quantized."""
    sources = [source for source in network.sources.values() if isinstance(source, Rows)]
    shapes = {name: shape for source in sources for name, shape in source.parts}
    if checkpoint is None:
        return shapes
    weights = dict.fromkeys(n.inputs["weight"] for n in network.nodes if n.op == "linear")
    for weight in weights:  # once, though several linears may read it
        module = weight.removesuffix(".weight")
        info = checkpoint.quantization_of(module)
        if info is None or info.scheme is None or not _is_declared(info, module):
            continue
        storage = info.scheme.storage
        rows, inner = shapes[weight]
        if inner % (storage.block or 1):
            raise BadTensorShape(
                f"{weight} has {inner} columns by config.json; {info.algo} has blocks of "
                f"{storage.block}",
                fix="exclude this module from the quantization",
            )
        shapes[weight] = storage.weight_shape(rows, inner)
        if storage.block is not None:
            shapes[f"{weight}_scale"] = storage.scale_shape(rows, inner)
    return shapes


def read_scales(sources: Mapping[str, Source], shards: Sequence[Shard]) -> None:
    """Read every scale of every rank once, so a bad one is named before anything is written."""
    for source in sources.values():
        inner = source.source if isinstance(source, RowShard) else source
        if isinstance(inner, LargestScale | RowScales):
            for shard in shards:
                for _ in source.chunks(shard):
                    pass
