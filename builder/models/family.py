"""What may differ between decoder families, and the normalised description of one model.

`ModelConfig` is read from config.json in the transformers 4 style (rope_theta, rope_scaling,
torch_dtype) or the 5 style (rope_parameters, dtype). Defaults for absent fields are those of the
family's own transformers config class, because exporters omit fields that equal them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmctl.builder.rope import OTHER_MODEL, Rope, read_rope
from llmctl.errors import CorruptFile, Unsupported
from llmctl.quantize.format import MAX_POSITIONS, check_model_fields

DTYPES = ("float32", "bfloat16", "float16")

# Fields whose null is not the family's default: no window, as many heads as queries have, their
# size by division.
_NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the family table: what a decoder of this architecture has."""

    architecture: str
    model_type: str
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    o_bias: Callable[[Mapping[str, Any]], bool]
    mlp_bias: Callable[[Mapping[str, Any]], bool]
    windows: Callable[[Mapping[str, Any], int], tuple[int, ...]]  # (config, layers) -> per layer
    has_qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # absent fields of config.json


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model in llmctl's normalised form. `windows` has one entry per layer, 0 for full
    attention."""

    family: Family
    dtype: str | None  # what config.json says; None when it is silent
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    norm_epsilon: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    windows: tuple[int, ...]
    rope: Rope


def never(config: Mapping[str, Any]) -> bool:
    """A property the family never has."""
    return False


def always(config: Mapping[str, Any]) -> bool:
    """A property the family always has."""
    return True


def flag(name: str) -> Callable[[Mapping[str, Any]], bool]:
    """A property that a field of config.json turns on; absent means off."""
    return lambda config: bool(config.get(name))


def full_attention(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Full attention in every layer."""
    return (0,) * num_layers


def late_layers_window(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Qwen's rule: with use_sliding_window, `layer_types` or the layers from max_window_layers."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return full_attention(config, num_layers)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config["max_window_layers"]
        kinds = ["sliding_attention" if i >= first else "full" for i in range(num_layers)]
    return windows_of(kinds, window)


def windows_of(kinds: Sequence[str], window: int) -> tuple[int, ...]:
    """The window of each layer, of the kinds that `layer_types` names."""
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_model_config(family: Family, config: Mapping[str, Any], where: str) -> ModelConfig:
    """Normalise config.json. Raises CorruptFile for values of the wrong type and impossible
    numbers, Unsupported for features that no family here has (another activation, partial rotary).
    """
    check_model_fields(config, family.model_type, where)
    given = {k: v for k, v in config.items() if v is not None or k in _NULL_IS_A_VALUE}
    known = {**family.defaults, **given}

    def size(name: str, default: int | None = None) -> int:
        value: int | None = known.get(name)
        value = default if value is None else value
        if value is None:
            raise CorruptFile(f"{where}: {name} is None; a positive integer is wanted")
        return value

    activation = known.get("hidden_act", "silu")
    if activation != "silu":
        raise Unsupported(
            f"{where}: hidden_act is {activation!r}; 'silu' is supported", fix=OTHER_MODEL
        )
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    layers, kv_heads = size("num_hidden_layers"), size("num_key_value_heads", heads)
    head_size = size("head_dim", hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise CorruptFile(
            f"{where}: {heads} heads over {kv_heads} key/value heads of size {head_size}; "
            "the heads must divide evenly and the size be even"
        )
    windows = family.windows(known, layers)
    if len(windows) != layers:
        raise CorruptFile(f"{where}: layer_types has {len(windows)} entries for {layers} layers")
    max_positions = size("max_position_embeddings")
    rope = read_rope(known, 10000.0, where)
    stretched = rope.stretched_length(max_positions)
    if stretched > MAX_POSITIONS:
        raise CorruptFile(
            f"{where}: RoPE stretches {max_positions} positions to {stretched}; at most "
            f"{MAX_POSITIONS} are built"
        )
    dtype = known.get("dtype", known.get("torch_dtype"))
    return ModelConfig(
        family=family,
        dtype=None if dtype is None else dtype.removeprefix("torch."),
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        norm_epsilon=float(known.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=known.get("tie_word_embeddings", False),
        has_qkv_bias=family.qkv_bias(known),
        has_o_bias=family.o_bias(known),
        has_mlp_bias=family.mlp_bias(known),
        windows=windows,
        rope=rope,
    )
