"""An EAGLE head as it is published, found and checked before a weight is read.

A folder with config.json and model.safetensors (or pytorch_model.bin):

    fc.weight                                        [hidden, taps * target hidden]
    input_norm.weight                                [taps * target hidden]; norm_before_fc
    fc_norm.0.weight, fc_norm.1.weight, ...          [target hidden]; fc_norm
    L.self_attn.{q,k,v}_proj.weight                  [heads * size, 2 hidden]; others: hidden
    L.self_attn.o_proj.weight                        [hidden, heads * size]
    L.self_attn.{q,k}_norm.weight                    [size]; of a qwen3 layer alone
    L.mlp.{gate,up,down}_proj.weight
    L.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight   [hidden]
    lm_head.weight                                   [draft vocab, hidden]
    d2t, t2d                                         vocabulary.py
    embed_tokens.weight                              [vocab, hidden]; else the target's is read
    M.weight_scale, M.input_scale                    of a linear that is quantized

L is `midlayer` in the layout of EAGLE's authors, `layers.0`, `layers.1` and so on in that of
`speculators`; hidden_norm is the first one's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.heads.eagle.config import HeadConfig, read_config
from llmctl.builder.heads.eagle.layers import MIDLAYER, count_layers, layer_numbers
from llmctl.builder.heads.eagle.names import MODULE
from llmctl.builder.heads.eagle.shapes import (
    EMBEDDING,
    FC_BIAS,
    FIRST,
    ONLY_OF_3,
    qk_norms,
    wanted_shapes,
)
from llmctl.builder.heads.eagle.vocabulary import KEPT, OFFSETS, check_vocabulary
from llmctl.builder.heads.medusa.pickled import describe_pickled, read_pickled
from llmctl.builder.heads.models import refuse_model
from llmctl.errors import (
    BadTensorShape,
    CheckpointNotFound,
    MissingTensor,
    PairMismatch,
    UnexpectedTensor,
    Unsupported,
)
from llmctl.quantize.checkpoint import Checkpoint, TensorInfo, read_header
from llmctl.quantize.format import (
    CONFIG_FILE,
    SINGLE_FILE,
    QuantizationInfo,
    has_file,
    read_json,
    read_stated_quantization,
)

if TYPE_CHECKING:
    import torch

PICKLED_FILE = "pytorch_model.bin"
_FLOATS = ("F32", "BF16", "F16")
_SCALES = ("weight_scale", "input_scale")  # of a quantized linear


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The head of a checkpoint: every shape fits, no weight has been read."""

    where: Path
    config: HeadConfig
    version: int  # 1 (EAGLE-2 drafts with the same heads) or 3
    taps: tuple[int, ...]  # layers of the target whose inputs it reads
    windows: tuple[int, ...]  # of its layers' attention, in tokens; 0: full
    is_reduced: bool  # its vocabulary
    has_embedding: bool  # of its own
    has_qk_norm: bool
    tensors: Mapping[str, TensorInfo]  # by their names in MODULE
    held: Mapping[str, torch.Tensor]  # of a pickled file
    quantization: QuantizationInfo | None

    @property
    def has_fc_bias(self) -> bool:
        """Whether its first product has one."""
        return FC_BIAS in self.tensors

    def beside(self, target: Checkpoint) -> Checkpoint:
        """The target's checkpoint with the head in it, in MODULE, quantized as its own config.json
        says."""
        tensors, held = dict(target.tensors), dict(target.held)
        for name, found in self.tensors.items():
            full = f"{MODULE}.{name}"
            tensors[full] = replace(found, name=full)
            if found.name in self.held:
                held[full] = self.held[found.name]
        whole = replace(target, tensors=tensors, held=held)
        if self.quantization is not None:
            return replace(whole, apart={**target.apart, MODULE: self.quantization})
        info = target.quantization
        if info is not None:
            info = replace(info, exclude=(*info.exclude, MODULE))
        return replace(whole, quantization=info)


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """What a folder holds; that it fits together is asked once the target's layers are known."""

    config: HeadConfig
    version: int  # 1 or 3, by its tensors
    num_layers: int
    file: Path
    tensors: Mapping[str, TensorInfo]  # by their names in MODULE
    held: Mapping[str, torch.Tensor]  # of a pickled file, by their names there
    quantization: QuantizationInfo | None  # that its config.json states


def is_eagle(folder: Path) -> bool:
    """Whether a folder seems to hold an EAGLE head. Raises CorruptFile."""
    file = folder / SINGLE_FILE
    if not has_file(file):
        return has_file(folder / PICKLED_FILE)
    stored = read_header(file)
    return any(name.startswith((MIDLAYER, f"{FIRST}.")) for name in stored)


def open_head(folder: Path) -> OpenedHead:
    """The head of a folder.

    Raises CheckpointNotFound, CorruptFile, PickleCheckpoint, UnexpectedTensor, UnknownQuantization,
    Unsupported and BadConfig (a whole model).
    """
    path = folder / CONFIG_FILE
    refuse_model(folder)
    if not has_file(path):
        raise CheckpointNotFound(
            f"{path} does not exist", fix="give the folder of an EAGLE head: --draft-model-dir HEAD"
        )
    file, pickled = folder / SINGLE_FILE, folder / PICKLED_FILE
    held: Mapping[str, torch.Tensor] = {}
    if has_file(file):
        stored = read_header(file)
    elif has_file(pickled):
        file, held = pickled, read_pickled(pickled)
        stored = describe_pickled(pickled, held)
    else:
        raise CheckpointNotFound(
            f"{folder} has no {SINGLE_FILE}",
            fix="give the folder of an EAGLE head: --draft-model-dir HEAD",
        )
    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        own = f"{FIRST}.{name.removeprefix(MIDLAYER)}" if name.startswith(MIDLAYER) else name
        if own in found:
            raise UnexpectedTensor(
                f"{file} holds {name} beside {found[own].name}", fix="fetch the head again"
            )
        found[own] = info
    numbers = layer_numbers(file, found)
    config = read_config(path)
    stated = None if any(name.startswith(MIDLAYER) for name in stored) else config.num_layers
    num_layers = count_layers(file, numbers, stated)
    version = 3 if any(name in found for name in ONLY_OF_3) else 1  # what the last version added
    quantization = read_stated_quantization(folder, read_json(path))
    return OpenedHead(config, version, num_layers, file, found, held, quantization)


def check_head(
    opened: OpenedHead, taps: tuple[int, ...], hidden_size: int, vocab_size: int
) -> EagleHead:
    """The head for a target of these sizes.

    Raises PairMismatch (the head of another target), MissingTensor, UnexpectedTensor,
    BadTensorShape, BadTensorValue and Unsupported.
    """
    config, tensors = opened.config, dict(opened.tensors)
    scheme = None if opened.quantization is None else opened.quantization.scheme
    packed = 1 if scheme is None else scheme.storage.values  # numbers in a stored element
    version = opened.version
    columns = len(taps) * hidden_size + (config.hidden_size if version == 1 else 0)
    _require_fit(config, version, tensors, columns, hidden_size, vocab_size, packed)
    info = tensors.get(EMBEDDING)
    is_copy = version == 1 or (config.is_speculators and not config.trains_embedding)
    if info is not None and is_copy and config.hidden_size == hidden_size:
        del tensors[EMBEDDING]
    sizes = (vocab_size, config.draft_vocab_size)
    is_reduced = check_vocabulary(opened.file, tensors, opened.held, *sizes)
    tensors.pop(KEPT, None)
    head = EagleHead(
        *(opened.file, config, version, taps, config.windows(opened.num_layers)),
        *(is_reduced, EMBEDDING in tensors, any(name in tensors for name in qk_norms(0))),
        *(tensors, opened.held, None if _is_plain(tensors) else opened.quantization),
    )
    _check_shapes(head, hidden_size)
    return head


def _require_fit(
    config: HeadConfig,
    version: int,
    tensors: Mapping[str, TensorInfo],
    columns: int,
    hidden_size: int,
    vocab_size: int,
    packed: int,
) -> None:
    pairs = [("vocab_size", config.vocab_size, vocab_size)]
    if config.target_hidden_size is not None:
        pairs.append(("target_hidden_size", config.target_hidden_size, hidden_size))
    elif version == 1 or EMBEDDING not in tensors:
        pairs.append(("hidden_size", config.hidden_size, hidden_size))
    fc = tensors.get("fc.weight")
    if fc is not None and len(fc.shape) == 2:
        stored = fc.shape[1] * (1 if fc.dtype in _FLOATS else packed)
        pairs.append(("columns of fc.weight", stored, columns))
    for name, own, wanted in pairs:
        if own != wanted:
            raise PairMismatch(
                f"{config.where}: the EAGLE head has {name} {own}; the target wants {wanted}",
                fix="use a head that was trained for this target",
            )
    if EMBEDDING not in tensors and config.hidden_size != hidden_size:
        raise MissingTensor(
            f"{config.where.parent} lacks {EMBEDDING}; its features are {config.hidden_size} wide, "
            f"the target's {hidden_size}",
            fix="fetch the head again",
        )


def _check_shapes(head: EagleHead, target_hidden: int) -> None:
    """All tensors that such a head has, each of its shape and dtype, and no others."""
    sizes = (len(head.taps), target_hidden)
    wanted = wanted_shapes(head.config, head.version, head.tensors, len(head.windows), *sizes)
    absent = [name for name in wanted if name not in head.tensors]
    if absent:
        raise MissingTensor(
            f"{head.where} lacks {len(absent)} of the {len(wanted)} tensors of an "
            f"EAGLE-{head.version} head: "
            f"{', '.join(absent[:8])}",
            fix="fetch the head again",
        )
    scheme = None if head.quantization is None else head.quantization.scheme
    for name, info in head.tensors.items():
        module, _, kind = name.rpartition(".")
        is_linear = len(wanted.get(f"{module}.weight", ())) == 2 and f"{module}.weight" != EMBEDDING
        is_scale = scheme is not None and kind in _SCALES and is_linear
        if name == OFFSETS or is_scale:  # scales are checked with those of the target
            continue
        if name not in wanted:
            raise UnexpectedTensor(
                f"{head.where} holds {info.name}, which no EAGLE-{head.version} head has",
                fix="use a head in the layout of EAGLE or of speculators",
            )
        shape, known = wanted[name], list(_FLOATS)
        if scheme is not None and is_linear:
            known.append(scheme.storage.dtype)
            if info.dtype == scheme.storage.dtype:
                shape = scheme.storage.weight_shape(*shape)
        if info.shape != shape:
            raise BadTensorShape(
                f"{info.name} in {head.where} has shape {list(info.shape)}; config.json implies "
                f"{list(shape)}",
                fix="check that config.json belongs to these weights",
            )
        if info.dtype not in known:
            raise Unsupported(
                f"{info.name} in {head.where} is {info.dtype}; heads in {', '.join(known)} are "
                "read",
                fix="use the head as it was trained, or `llmctl quantize --draft-model-dir`",
            )


def _is_plain(tensors: Mapping[str, TensorInfo]) -> bool:
    return all(info.dtype in _FLOATS for n, info in tensors.items() if n.endswith(".weight"))
