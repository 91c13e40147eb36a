"""What may differ between decoder families, and the normalised description of one model.

`ModelConfig` is read from config.json in the transformers 4 style (rope_theta, rope_scaling,
torch_dtype) or the 5 style (rope_parameters, dtype). Defaults for absent fields are those of the
family's own transformers config class, because exporters omit fields that equal them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmctl.builder.rope import Rope, read_rope
from llmctl.errors import CorruptFile, Unsupported

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 10_000  # far more than any model has; each is described and named


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
    """A model in our own words. `windows` has one entry a layer, 0 for full attention."""

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
    """Every layer sees everything."""
    return (0,) * num_layers


def late_layers_window(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Qwen's rule: with use_sliding_window, `layer_types` or the layers from max_window_layers."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return full_attention(config, num_layers)
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config["max_window_layers"])
        kinds = ["sliding_attention" if i >= first else "full" for i in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)


def read_model_config(family: Family, config: Mapping[str, Any], where: str) -> ModelConfig:
    """Normalise config.json. Raises CorruptFile for impossible numbers, Unsupported for features
    that no family here has (another activation, partial rotary, ...).
    """
    known = {**family.defaults, **config}

    def size(name: str, default: int | None = None) -> int:
        value = known.get(name)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise CorruptFile(f"{where}: {name} is {value!r}; a positive integer is wanted")
        return value

    activation = known.get("hidden_act", "silu")
    if activation != "silu":
        raise Unsupported(f"{where}: hidden_act is {activation!r}; 'silu' is supported")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    layers, kv_heads = size("num_hidden_layers"), size("num_key_value_heads", heads)
    if layers > MAX_LAYERS:
        raise CorruptFile(f"{where}: num_hidden_layers is {layers}; at most {MAX_LAYERS} are built")
    head_size = size("head_dim", hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise CorruptFile(
            f"{where}: {heads} heads over {kv_heads} key/value heads of size {head_size}; "
            "the heads must divide evenly and the size be even"
        )
    windows = family.windows(known, layers)
    if len(windows) != layers:
        raise CorruptFile(f"{where}: layer_types has {len(windows)} entries for {layers} layers")
    epsilon = known.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
        raise CorruptFile(f"{where}: rms_norm_eps is {epsilon!r}; a number in [0, 1) is wanted")
    dtype = known.get("dtype", known.get("torch_dtype"))
    return ModelConfig(
        family=family,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        norm_epsilon=float(epsilon),
        max_position_embeddings=size("max_position_embeddings"),
        tie_word_embeddings=bool(known.get("tie_word_embeddings", False)),
        has_qkv_bias=family.qkv_bias(known),
        has_o_bias=family.o_bias(known),
        has_mlp_bias=family.mlp_bias(known),
        windows=windows,
        rope=read_rope(known, 10000.0, where),
    )
