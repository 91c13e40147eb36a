"""The model families that can be quantized, and one-layer slices of them.

A slice is the family's own transformers class with a single decoder layer and everything else
replaced by identities, so masks, positions and rotary tables are computed by the code that
computes them for the whole model, while memory holds one layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.errors import CorruptFile, UnexpectedTensor
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.config_fields import ARCHITECTURES, check_model_fields, find_architecture
from llmctl.quantize.tied import EMBEDDING as EMBEDDING
from llmctl.quantize.tied import HEAD as HEAD
from llmctl.quantize.tied import is_tied

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's architecture: no weights, only names and shapes."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    layer_shapes: Mapping[str, tuple[int, ...]]  # names as in layer 0, without the prefix
    linear_names: tuple[str, ...]  # "self_attn.q_proj", …

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def is_tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return bool(self.config.tie_word_embeddings)

    @property
    def outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors outside the decoder layers."""
        vocab, hidden = int(self.config.vocab_size), int(self.config.hidden_size)
        shapes = {EMBEDDING: (vocab, hidden), FINAL_NORM: (hidden,)}
        return shapes if self.is_tied else {**shapes, HEAD: (vocab, hidden)}


def layer_prefix(index: int) -> str:
    """What the names of layer `index` start with."""
    return f"model.layers.{index}."


def read_model(checkpoint: Checkpoint) -> Model:
    """The architecture of a checkpoint, every tensor's presence and shape checked.

    Raises UnknownArchitecture, CorruptFile (config.json), MissingTensor, BadTensorShape or
    UnexpectedTensor.
    """
    import transformers

    where = str(checkpoint.path / "config.json")
    architecture = find_architecture(checkpoint.config, where)
    check_model_fields(checkpoint.config, ARCHITECTURES[architecture], where)
    if checkpoint.config.get("num_hidden_layers") is None:
        raise CorruptFile(f"{where}: num_hidden_layers is None; a positive integer is wanted")
    # The class that AutoModel takes for a Mistral with layer_types: Mistral's own ignores them.
    # Without a window both are the same, and Ministral's fails.
    is_mixed = architecture == "MistralForCausalLM" and checkpoint.config.get("layer_types")
    is_mixed = is_mixed and checkpoint.config.get("sliding_window", 0) is not None
    model_class = getattr(transformers, "MinistralForCausalLM" if is_mixed else architecture)
    try:
        with warnings.catch_warnings():
            # transformers remarks on odd token ids and rope fields; they do not concern weights.
            warnings.simplefilter("ignore")
            config = model_class.config_class.from_dict(checkpoint.config)
            config._attn_implementation = "sdpa"
            slice_ = build_slice(model_class, config, 0)
    except Exception as error:  # whatever a config class raises, the config is at fault
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # some have several lines
        raise CorruptFile(f"{where} does not describe a {architecture}: {reason}") from error
    config.tie_word_embeddings = is_tied(checkpoint, bool(config.tie_word_embeddings))
    model = Model(model_class, config, *_describe_layer(slice_))
    _check_tensors(checkpoint, model)
    return model


def _describe_layer(slice_: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    import torch

    (layer,) = slice_.model.layers
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    linears = [name for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)]
    return shapes, tuple(linears)


def build_slice(
    model_class: type[PreTrainedModel], config: PretrainedConfig, layer: int | None
) -> PreTrainedModel:
    """A model of one layer (or, for None, of the final norm and lm_head) with weights on `meta`.

    Called with inputs_embeds = the hidden states that enter; `.logits` are those that leave.
    """
    import torch
    from torch import nn

    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[layer or 0]]
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model: Any = model_class(config)
    body = model.model
    # Its buffers are computed, not stored, so they must not stay on meta.
    body.rotary_emb = type(body.rotary_emb)(config=config)
    body.embed_tokens = nn.Identity()
    if layer is None:
        body.layers = nn.ModuleList()
        config.num_hidden_layers = 0
    else:
        body.norm, model.lm_head = nn.Identity(), nn.Identity()
    whole: PreTrainedModel = model.eval()
    return whole


def _check_tensors(checkpoint: Checkpoint, model: Model) -> None:
    checkpoint.require(model.outer_shapes)
    known = set(model.outer_shapes)
    for index in range(model.num_layers):
        shapes = {layer_prefix(index) + name: s for name, s in model.layer_shapes.items()}
        checkpoint.require(shapes)
        known.update(shapes)
    extra = [name for name in checkpoint.tensors if name not in known]
    # Derived values that old checkpoints store, and the second name of a tied embedding.
    harmless = {HEAD} if model.is_tied else set()
    extra = [name for name in extra if name not in harmless and "rotary_emb" not in name]
    if extra:
        raise UnexpectedTensor(
            f"{checkpoint.path} has {len(extra)} tensors that its config.json does not imply: "
            + ", ".join(sorted(extra)[:8]),
            fix="check that config.json belongs to these weights",
        )
