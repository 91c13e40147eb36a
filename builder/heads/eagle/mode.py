"""--speculative_decoding_mode eagle: the head, and the limits that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.eagle.names import DEFAULT_LENGTH, MOST_DRAFTS, ONE_LAYER
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.heads.eagle.checkpoint import EagleHead
    from llmctl.builder.models.family import ModelConfig
    from llmctl.builder.network import Network
    from llmctl.quantize.checkpoint import Checkpoint

OPTIONS = ("max_non_leaves_per_layer", "eagle_layers")
PUBLISHED_VOCAB = 32_000  # of heads of Llama 3


def prepare_eagle(
    request: BuildRequest, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[BuildRequest, Checkpoint, Mapping[str, Any]]:
    """See BuildMode. Reads headers, and the maps of a reduced vocabulary.

    Raises what `check_head` raises, and BadConfig (no head, layers that the target does not have,
    more drafts than there may be).
    """
    from llmctl.builder.heads.eagle.checkpoint import check_head, open_head
    from llmctl.builder.heads.eagle.config import choose_taps, last_tap

    if request.draft_model_dir is None:
        raise BadConfig(
            "--speculative-decoding-mode eagle needs an EAGLE head",
            fix="name its folder: --draft-model-dir HEAD",
        )
    opened = open_head(Path(request.draft_model_dir))
    config, layers = opened.config, model.num_hidden_layers
    if opened.version == 1:
        taps = last_tap(layers, request.eagle_layers)
    else:
        taps = choose_taps(config.layer_ids, layers, request.eagle_layers, str(config.where))
    head = check_head(opened, taps, model.hidden_size, model.vocab_size)
    limited = _limited(request)
    return limited, head.beside(checkpoint), _facts(head, _width(limited))


def invent_eagle(
    request: BuildRequest, model: ModelConfig
) -> tuple[BuildRequest, Mapping[str, Any]]:
    """See BuildMode: a head of the shape that is published for Llama 3, one layer like the
    target's. Its vocabulary is a quarter of the target's, at most 32,000: the first tokens. Raises
    BadConfig."""
    from llmctl.builder.heads.eagle.config import choose_taps

    if request.draft_model_dir is not None:
        raise BadConfig(
            "--draft-model-dir names a head to read; --load-format dummy and planted generate one",
            fix="leave it out",
        )
    taps = choose_taps(None, model.num_hidden_layers, request.eagle_layers, "")
    limited = _limited(request)
    return limited, {
        "version": 3,
        "taps": list(taps),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_heads": model.num_attention_heads,
        "num_kv_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "norm_epsilon": model.norm_epsilon,
        "draft_vocab_size": min(PUBLISHED_VOCAB, max(1, model.vocab_size // 4)),
        "is_reduced": True,
        "norm_before_residual": True,  # so that a planted head can leave features out
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "has_qk_norm": False,
        "has_fc_bias": False,
        "has_embedding": False,
        "windows": [0],
        "rope": {},
        "num_beams": _width(limited),
    }


def record_heads(model: ModelConfig, dtype: str, facts: Mapping[str, Any]) -> Sequence[Network]:
    """The two graphs of the head."""
    from llmctl.builder.heads.eagle.network import Recorder

    return Recorder(model, dtype, facts).record()


def describe(facts: Mapping[str, Any]) -> str:
    """The head as `inspect` shows it."""
    residual = "norm of the feature" if facts["norm_before_residual"] else "feature"
    nested = facts["rope"].get("rope_parameters") or {}
    theta = nested.get("rope_theta") or facts["rope"].get("rope_theta", "10000, the default")
    norms = "".join(
        f"{name}, " for name in ("norm_before_fc", "fc_norm", "norm_output") if facts[name]
    )
    layers, width = ", ".join(map(str, facts["taps"])), facts["num_beams"]
    windows = facts.get("windows", ONE_LAYER)
    own = f"{len(windows)} layers, " if len(windows) > 1 else ""
    if any(windows):
        own += f"windows of {', '.join(str(size) if size else 'all' for size in windows)} tokens, "
    if facts["version"] == 1:
        return (
            f"eagle 1 or 2, reads what the last layer puts out, width {facts['hidden_size']}, "
            f"{own}RoPE base: {theta}, trees: {width} drafts of a level that others follow"
        )
    return (
        f"eagle 3, reads the inputs of layers {layers}, width {facts['hidden_size']}, {own}"
        f"vocabulary of {facts['draft_vocab_size']}, residual: {residual}, RoPE base: {theta}, "
        f"{norms}trees: {width} drafts of a level that others follow"
    )


def _limited(request: BuildRequest) -> BuildRequest:
    """The request with the drafts of a round in it. Raises BadConfig for too many."""
    length = request.max_draft_len or DEFAULT_LENGTH
    if length > MOST_DRAFTS:
        raise BadConfig(
            f"--max-draft-len is {length}; an EAGLE head drafts at most {MOST_DRAFTS}",
            fix=f"--max-draft-len {MOST_DRAFTS} or less",
        )
    return replace(request, max_draft_len=length)


def _width(request: BuildRequest) -> int:
    """Drafts of a level that others may follow. Raises BadConfig for more than there are drafts."""
    width = request.max_non_leaves_per_layer or 1
    if width > request.max_draft_len:
        raise BadConfig(
            f"--max-non-leaves-per-layer is {width}, of --max-draft-len {request.max_draft_len}",
            fix=f"--max-non-leaves-per-layer {request.max_draft_len} or less, or more drafts",
        )
    return width


def _facts(head: EagleHead, width: int) -> dict[str, Any]:
    """What config.json keeps. width: drafts of a level that others may follow."""
    config = head.config
    return {
        "version": head.version,
        "taps": list(head.taps),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "norm_epsilon": config.norm_epsilon,
        "draft_vocab_size": config.draft_vocab_size,
        "is_reduced": head.is_reduced,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "has_qk_norm": head.has_qk_norm,
        "has_fc_bias": head.has_fc_bias,
        "has_embedding": head.has_embedding,
        "windows": list(head.windows),  # one for each layer
        "rope": dict(config.rope),
        "num_beams": width,  # rows of a sequence in a step of the head
    }
