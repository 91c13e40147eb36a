"""The limits an engine is built for, with TensorRT-LLM's names, and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from llmctl.builder.models.family import DTYPES, ModelConfig
from llmctl.builder.ranks import SUM_LEAVES
from llmctl.builder.speculative_modes import (
    DRAFT_MODELS,
    NONE,
    SAME_MODES,
    SPECULATIVE_MODES,
    Facts,
    available_modes,
    mode_options,
)
from llmctl.errors import BadConfig, Unsupported
from llmctl.quantize.format import MAX_POSITIONS

_MOST = 2**31 - 1  # positions, slots and rows are counted in 32 bits
KV_CACHE_DTYPES = ("auto", "fp8", "int8", "none")


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a user asks for; None means "decide from the model"."""

    dtype: str = "auto"
    max_batch_size: int = 8  # sequences per step
    max_seq_len: int | None = None  # prompt + output, tokens
    max_input_len: int | None = None
    max_num_tokens: int = 2048  # packed tokens per step: the chunk budget of prefill
    max_beam_width: int = 1
    max_draft_len: int = 0
    speculative_decoding_mode: str | None = None
    tokens_per_block: int = 32
    kv_cache_type: str = "paged"
    kv_cache_dtype: str = "auto"
    kv_cache_unit_scales: bool = False  # assume 1.0 for FP8 without scales; only on request
    logits_dtype: str = "float32"
    gather_context_logits: bool = False
    tp_size: int = 1
    tp_invariant: bool = False  # the same text for every tp_size
    draft_model_dir: str | None = None  # folder of the heads; None: they are in the checkpoint
    num_medusa_heads: int | None = None
    medusa_choices: str | None = None
    redrafter_num_beams: int | None = None
    redrafter_draft_len_per_beam: int | None = None  # without the target's own token
    redrafter_greedy_search: bool | None = None  # drafts for greedy requests alone
    lookahead_config: str | None = None  # [window,ngram,verification]
    max_non_leaves_per_layer: int | None = None  # drafts of a level of a tree that others follow
    eagle_layers: str | None = None  # of the target, whose inputs the head reads
    outputs: tuple[str, ...] = ()  # besides logits; the names are in builder/models/decoder.py

    def __post_init__(self) -> None:
        limits = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "tp_size")
        sizes = (
            *("num_medusa_heads", "redrafter_num_beams", "redrafter_draft_len_per_beam"),
            "max_non_leaves_per_layer",
        )
        for name in (*limits, *sizes):
            value = getattr(self, name)
            least = 2 if name == "max_seq_len" else 1  # a prompt and an output
            _require(value is None or least <= value <= _MOST, name, value, f"{least} to {_MOST}")
        length = self.max_seq_len or 0
        _require(length <= MAX_POSITIONS, "max_seq_len", length, f"at most {MAX_POSITIONS}")
        draft_len = self.max_draft_len
        _require(0 <= draft_len <= _MOST, "max_draft_len", draft_len, f"0 to {_MOST}")
        blocks = self.tokens_per_block
        _require(
            8 <= blocks <= 128 and blocks & (blocks - 1) == 0,
            "tokens_per_block",
            blocks,
            "a power of two from 8 to 128",
        )
        _choice("dtype", self.dtype, ("auto", *DTYPES))
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _choice("logits_dtype", self.logits_dtype, ("float32", "float16"))
        _choice("kv_cache_type", self.kv_cache_type, ("paged", "continuous", "disabled"))
        if self.speculative_decoding_mode is not None:
            known = (*SPECULATIVE_MODES, *SAME_MODES)
            _choice("speculative_decoding_mode", self.speculative_decoding_mode, known)
        _only("max_beam_width", self.max_beam_width, 1, "beam search is not in this version")
        _only("logits_dtype", self.logits_dtype, "float32", "sampling works on float32 logits")
        if self.gather_context_logits:
            raise Unsupported(
                "--gather-context-logits is refused: logits are computed for the last prompt token "
                "and for generated tokens",
                fix="leave --gather-context-logits out",
            )
        if not SPECULATIVE_MODES[self.mode].is_available:
            raise Unsupported(
                f"--speculative-decoding-mode {self.mode} is not in this version; "
                f"available: {available_modes()}",
                fix="--speculative-decoding-mode draft_tokens_external",
            )
        for name in mode_options():
            modes = [mode for mode, row in SPECULATIVE_MODES.items() if name in row.options]
            if getattr(self, name) is not None and self.mode not in modes:
                is_model = name == "draft_model_dir" and self.mode == "draft_tokens_external"
                raise BadConfig(
                    f"--{name.replace('_', '-')} is for --speculative-decoding-mode "
                    f"{' and '.join(modes)}, and the mode is {self.mode}",
                    fix=DRAFT_MODELS if is_model else f"--speculative-decoding-mode {modes[0]}",
                )

    @property
    def mode(self) -> str:
        """The mode in force: --max-draft-len alone asks for the simplest one."""
        if self.speculative_decoding_mode is None:
            return "draft_tokens_external" if self.max_draft_len else "none"
        return SAME_MODES.get(self.speculative_decoding_mode, self.speculative_decoding_mode)

    @staticmethod
    def from_mapping(values: Mapping[str, Any], where: str) -> BuildRequest:
        """A request from a JSON object. Raises BadConfig for unknown names and wrong types."""
        known = {f.name: f for f in fields(BuildRequest)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            nearest = get_close_matches(unknown[0], known, n=1)
            raise BadConfig(
                f"{where}: {unknown[0]!r} is not a build option",
                fix=f"the nearest is {nearest[0]}" if nearest else f"there are {', '.join(known)}",
            )
        for name, value in values.items():
            wanted = known[name].type
            names = str(wanted).split(" | ")
            is_right = type(value).__name__ in names or (value is None and "None" in names)
            if not is_right:
                raise BadConfig(f"{where}: {name} is {value!r}; it must be {wanted}")
        return BuildRequest(**values)


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """`build_config` of config.json: the limits in effect."""

    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    max_num_tokens: int
    max_beam_width: int
    max_draft_len: int
    speculative_decoding_mode: int
    tokens_per_block: int
    kv_cache_type: str
    kv_cache_dtype: str
    gather_context_logits: bool
    gather_generation_logits: bool
    strongly_typed: bool = True
    tp_size: int = 1  # ranks, with an engine file each
    sum_leaves: int = 1  # parts of a sum that ranks divide; 1: text differs between tp_sizes
    draft_heads: Mapping[str, Any] = field(default_factory=dict)  # what its mode says of its heads

    def to_dict(self) -> dict[str, Any]:
        """As stored."""
        return asdict(self)

    @property
    def max_num_rows(self) -> int:
        """The most rows of one step that get logits: a root and its drafts for every sequence."""
        return min(self.max_batch_size * (self.max_draft_len + 1), self.max_num_tokens)

    @property
    def max_num_beams(self) -> int:
        """The most rows of one step of a head that computes several of a sequence, or may; 0
        without one."""
        return self.max_batch_size * int(self.draft_heads.get("num_beams", 0))


def resolve_build_config(
    request: BuildRequest, model: ModelConfig, kv_cache_dtype: str, draft_heads: Facts = NONE
) -> tuple[BuildConfig, list[str]]:
    """(the limits in force, a sentence for each value that was adjusted or is unusual).

    The rules are upstream's: max_num_tokens is raised to hold one verification of a full batch
    and cut to what max_batch_size sequences can have.
    """
    notices: list[str] = []
    _check_mode(request)
    stretched = model.rope.stretched_length(model.max_position_embeddings)
    is_dynamic = model.rope.rope_type == "dynamic"
    max_seq_len = request.max_seq_len
    longest = max_seq_len or stretched
    if request.max_draft_len >= longest:
        raise BadConfig(
            f"max_draft_len is {request.max_draft_len}, but a sequence has {longest} tokens",
            fix=f"--max-draft-len {longest - 1} or less; 1 to 64 are usual",
        )
    if max_seq_len is None:
        max_seq_len = stretched + (0 if is_dynamic else request.max_draft_len)
    elif max_seq_len > stretched + request.max_draft_len:
        notices.append(
            f"max_seq_len {max_seq_len} is longer than the {stretched} tokens the model knows"
        )
    if is_dynamic and max_seq_len > model.max_position_embeddings:
        raise Unsupported(
            f"max_seq_len is {max_seq_len}, but dynamic RoPE has a fixed table only up to "
            f"max_position_embeddings = {model.max_position_embeddings}",
            fix=f"--max-seq-len {model.max_position_embeddings}",
        )
    max_input_len = request.max_input_len or max_seq_len
    if max_input_len > max_seq_len:
        raise BadConfig(
            f"max_input_len is {max_input_len}, which exceeds max_seq_len {max_seq_len}",
            fix=f"--max-seq-len {max_input_len} or more",
        )
    if max_input_len < max_seq_len:
        notices.append(
            f"max_input_len {max_input_len} does not limit prompts: they are processed in chunks, "
            f"up to max_seq_len {max_seq_len}"
        )
    # A slot of a continuous cache is a block that a whole sequence fits in.
    is_continuous = request.kv_cache_type == "continuous"
    block = max_seq_len if is_continuous else request.tokens_per_block
    wanted, rows = request.max_num_tokens, request.max_batch_size * (request.max_draft_len + 1)
    lowest, highest = max(rows, block), max_seq_len * request.max_batch_size
    max_num_tokens = max(min(wanted, highest), lowest)
    if max_num_tokens > _MOST:
        raise BadConfig(
            f"max_batch_size * (max_draft_len + 1) = {rows} tokens of a step; at most {_MOST}",
            fix="a smaller --max-batch-size or --max-draft-len",
        )
    if max_num_tokens > wanted:
        notices.append(
            f"max_num_tokens raised from {wanted} to {max_num_tokens}: the most of "
            f"max_batch_size * (max_draft_len + 1) = {rows} and one block of {block}"
        )
    elif max_num_tokens < wanted:
        notices.append(
            f"max_num_tokens lowered from {wanted} to {max_num_tokens}: "
            "max_batch_size sequences of max_seq_len have no more"
        )
    config = BuildConfig(
        max_batch_size=request.max_batch_size,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_beam_width=request.max_beam_width,
        max_draft_len=request.max_draft_len,
        speculative_decoding_mode=SPECULATIVE_MODES[request.mode].number,
        tokens_per_block=block,
        kv_cache_type=request.kv_cache_type.upper(),
        kv_cache_dtype=kv_cache_dtype,
        gather_context_logits=False,
        gather_generation_logits=True,  # the executor always has them, asked for or not
        tp_size=request.tp_size,
        sum_leaves=SUM_LEAVES if request.tp_invariant else 1,
        draft_heads=dict(draft_heads),
    )
    return config, notices


def _check_mode(request: BuildRequest) -> None:
    """A mode without drafts is a mistake, and so are drafts without a mode."""
    mode = request.mode
    if (mode == "none") != (request.max_draft_len == 0):
        raise BadConfig(
            f"speculative_decoding_mode is {mode} with max_draft_len {request.max_draft_len}",
            fix="give --max-draft-len with draft_tokens_external, neither for a draft engine",
        )


def choose_dtype(requested: str, model: ModelConfig, stored: str) -> str:
    """The model dtype T: the one asked for, or config.json's, or that of the stored weights.

    Raises Unsupported for a dtype no kernel computes in.
    """
    dtype = (model.dtype or stored) if requested == "auto" else requested
    if dtype not in DTYPES:
        raise Unsupported(
            f"the checkpoint's dtype is {dtype}; engines compute in {', '.join(DTYPES)}",
            fix="--dtype float32",
        )
    return dtype


def _require(condition: bool, name: str, found: object, wanted: str) -> None:
    if not condition:
        raise BadConfig(f"{name} is {found}; it must be {wanted}")


def _choice(name: str, found: str, choices: Any) -> None:
    _require(found in choices, name, found, f"one of {', '.join(choices)}")


def _only(name: str, found: object, wanted: object, reason: str) -> None:
    if found != wanted:
        flag = name.replace("_", "-")
        raise Unsupported(f"--{flag} {found} is refused: {reason}", fix=f"--{flag} {wanted}")
