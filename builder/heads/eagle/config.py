"""config.json of an EAGLE-3 head, in the layout of EAGLE's authors or of `speculators`.

What is not written has one meaning, whatever the target's own config says:

    rope_theta             10000, the default of the head's attention; never the target's base
    norm_before_residual   false: the residual is the feature, not its norm
    norm_before_fc, fc_norm, norm_output   false
    layer ids              the inputs of layers 2, L / 2 and L - 3
    layer_types            full attention in every layer; else sliding_window where they say so

Lists of layer ids come in two conventions. One whose first id is 1 names layers by what they put
out, all others by what they read; `--eagle-layers` says it outright.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmctl.builder.rope import read_rope
from llmctl.errors import BadConfig, CorruptFile, Unsupported
from llmctl.quantize.format import (
    FLAG,
    MODEL_FIELDS,
    TEXT,
    Kind,
    check_fields,
    integer,
    read_json,
)

DEFAULT_THETA = 10000.0
_SPECULATORS = "speculators_model_type"
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_FORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of arithmetic
_SIZE = integer(1, 1 << 24)
_LAYERS = Kind(
    "a list of layer ids",
    lambda value: (
        isinstance(value, list)
        and 1 <= len(value) <= 64
        and all(type(layer) is int and 0 <= layer < 10_000 for layer in value)
    ),
)
_FIELDS = {
    "draft_vocab_size": _SIZE,
    "target_hidden_size": _SIZE,
    "eagle_aux_hidden_state_layer_ids": _LAYERS,
    "embed_requires_grad": FLAG,
    "bias": FLAG,
    **dict.fromkeys(_FORMS, FLAG),
}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What config.json says of a head."""

    where: Path
    is_speculators: bool
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    vocab_size: int  # of the target
    draft_vocab_size: int
    target_hidden_size: int | None
    norm_before_residual: bool
    norm_before_fc: bool  # of the features side by side: input_norm
    fc_norm: bool  # of each feature on its own
    norm_output: bool  # what goes on to the next step has been through the last norm
    has_fc_bias: bool | None  # of EAGLE-1 and 2; None: as there are tensors
    trains_embedding: bool  # else a stored embedding is a copy of the target's
    layer_ids: tuple[int, ...] | None  # as they are written
    rope: Mapping[str, Any]  # the fields that `read_rope` takes
    num_layers: int | None  # as it is written
    layer_types: tuple[str, ...]  # as they are written; (): none
    sliding_window: int  # tokens; 0: none

    def windows(self, num_layers: int) -> tuple[int, ...]:
        """The attention window of each of so many layers, in tokens; 0: full attention. Raises
        CorruptFile for types of another number of layers, and windows without a size."""
        windows = tuple(
            self.sliding_window if kind == "sliding_attention" else 0 for kind in self.layer_types
        )
        # EAGLE's own code reads no types and attends to all: those of other layers are a target's.
        is_copy = not self.is_speculators and len(windows) != num_layers
        if is_copy or "sliding_attention" not in self.layer_types:
            return (0,) * num_layers
        if len(windows) != num_layers or not self.sliding_window:
            raise CorruptFile(
                f"{self.where}: layer_types {list(self.layer_types)} with sliding_window "
                f"{self.sliding_window or None} for {num_layers} layers; one type a layer and the "
                "size of the windows are wanted",
                fix="fetch the head again",
            )
        return windows


def read_config(path: Path) -> HeadConfig:
    """config.json of a head.

    Raises CorruptFile for fields of the wrong type and impossible numbers, Unsupported for a form
    of head that is not read.
    """
    config = read_json(path)
    is_speculators = _SPECULATORS in config
    check_fields(config, {_SPECULATORS: TEXT, **_FIELDS}, str(path))
    if is_speculators and config[_SPECULATORS] != "eagle3":
        raise Unsupported(
            f"{path} says {_SPECULATORS} {config[_SPECULATORS]!r}; 'eagle3' is read",
            fix="use an EAGLE-3 head",
        )
    layer = config.get("transformer_layer_config") if is_speculators else config
    nested = config.get("eagle_config") or {}
    if not isinstance(layer, dict) or not isinstance(nested, dict):
        raise CorruptFile(f"{path}: transformer_layer_config and eagle_config are objects")
    check_fields(layer, MODEL_FIELDS, str(path))
    check_fields(nested, _FIELDS, f"{path}: eagle_config")
    _require_known_form(path, config, layer)

    def size(name: str, default: int | None = None) -> int:
        value: int | None = layer.get(name)
        value = default if value is None else value
        if value is None:
            raise CorruptFile(f"{path}: {name} is missing; a positive integer is wanted")
        return value

    heads = size("num_attention_heads")
    kv_heads, vocab_size = size("num_key_value_heads", heads), size("vocab_size")
    head_size = size("head_dim", size("hidden_size") // heads)
    if heads % kv_heads or head_size % 2 or head_size < 2:
        raise CorruptFile(
            f"{path}: {heads} heads over {kv_heads} key/value heads of size {head_size}; the heads "
            "must divide evenly and the size be even"
        )
    read_rope(layer, DEFAULT_THETA, str(path))
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = nested.get("eagle_aux_hidden_state_layer_ids") if ids is None else ids
    return HeadConfig(
        where=path,
        is_speculators=is_speculators,
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        norm_epsilon=float(layer.get("rms_norm_eps") or 1e-6),
        vocab_size=vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
        target_hidden_size=config.get("target_hidden_size"),
        **{name: bool(config.get(name)) for name in _FORMS},
        has_fc_bias=config.get("bias"),
        trains_embedding=bool(config.get("embed_requires_grad")),
        layer_ids=None if ids is None else tuple(ids),
        rope={name: layer[name] for name in _ROPE if layer.get(name) is not None},
        num_layers=layer.get("num_hidden_layers"),
        layer_types=tuple(layer.get("layer_types") or ()),
        sliding_window=int(layer.get("sliding_window") or 0),
    )


def choose_taps(
    stated: Sequence[int] | None, num_layers: int, asked: str | None, where: str
) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads. stated: the ids of config.json; asked:
    the value of --eagle-layers, which are inputs. Raises BadConfig for layers that are not there.
    """
    if asked is not None:
        taps, source = _parse(asked), "--eagle-layers"
    elif stated is None:
        taps, source = (2, num_layers // 2, num_layers - 3), "the layers that a head reads"
    else:
        shift = 1 if stated[0] == 1 else 0  # what a layer puts out, the next one reads
        taps, source = (
            tuple(layer + shift for layer in stated),
            f"{where}: layer ids {list(stated)}",
        )
    if not all(0 <= layer < num_layers for layer in taps):
        raise BadConfig(
            f"{source} are the inputs of layers {', '.join(map(str, taps))}; the target has the "
            f"layers 0 to {num_layers - 1}",
            fix="use a head that was trained for this target, or give --eagle-layers",
        )
    return taps


def last_tap(num_layers: int, asked: str | None) -> tuple[int, ...]:
    """What a head of EAGLE-1 or 2 reads: what the last layer puts out. Raises BadConfig where
    layers are asked for."""
    if asked is not None:
        raise BadConfig(
            f"--eagle-layers is {asked!r}; a head of EAGLE-1 or 2 reads what the last layer puts "
            "out",
            fix="leave it out",
        )
    return (num_layers,)


def _parse(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise BadConfig(
            f"--eagle-layers is {text!r}; a list of layers is wanted, whose inputs the head reads",
            fix="for example: --eagle-layers 2,16,29",
        )
    return tuple(map(int, parts))


def _require_known_form(path: Path, config: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise CorruptFile(
            f"{path} says norm_before_fc and fc_norm; features have one norm or one each"
        )
    activation = layer.get("hidden_act")
    if activation not in (None, "silu"):
        raise Unsupported(f"{path}: hidden_act is {activation!r}; 'silu' is supported")
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        raise Unsupported(f"{path}: the head's layer has biases, which are not read")
