"""The options of `llmctl build` as what the builder takes: limits, weights, plugins, a logger."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.builder.models.family import DTYPES
from llmctl.builder.plugin_config import OPTIONS
from llmctl.cli.output_files import ending, require_writable
from llmctl.cli.refused import refuse
from llmctl.cli.signatures import give_parameters
from llmctl.errors import BadConfig, CorruptFile

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.planted import LoadFormat
    from llmctl.builder.signing_keys import SigningKey

LOG_LEVELS = {  # trtllm-build's names -> Python's levels
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
MODE_OPTIONS: dict[str, tuple[type, str]] = {  # those of one --speculative-decoding-mode
    "draft_model_dir": (
        str,
        "Folder of the head, or of Medusa heads as published or in vLLM's layout. (default for "
        "medusa: in the checkpoint)",
    ),
    "num_medusa_heads": (int, "For medusa: heads to take. (default: all)"),
    "medusa_choices": (
        str,
        "For medusa: the tree of drafts, [[0],[0,0],[1]] or mc_sim_7b_63. (default: that one, as "
        "far as the heads go)",
    ),
    "redrafter_num_beams": (
        int,
        "For redrafter: beams. (default: the head's own, or 5)",
    ),
    "redrafter_draft_len_per_beam": (
        int,
        "For redrafter: drafts of a beam. (default: the head's own, or 5)",
    ),
    "redrafter_greedy_search": (
        bool,
        "For redrafter: draft only for greedy requests.",
    ),
    "lookahead_config": (
        str,
        "For lookahead_decoding: [window,ngram,verification], [7,5,7].",
    ),
    "max_non_leaves_per_layer": (
        int,
        "For eagle: drafts of one level that others may follow, in trees. (default: 1)",
    ),
    "eagle_layers": (
        str,
        "For eagle: layers of the target whose inputs the head reads, as 2,16,29. (default: the "
        "head's own)",
    ),
}
RANK_OPTIONS: dict[str, tuple[type, str]] = {
    "tp_size": (
        int,
        "Ranks that each hold a share of the weights; cpu, cuda: 1, 2, 4 or 8. (default: 1)",
    ),
    "tp_invariant": (
        bool,
        "Add in an order that gives the same text for every --tp-size.",
    ),
}
DRAFT_OPTIONS: dict[str, tuple[type, str]] = {  # decide a request before it is planned
    "draft_tp": (
        str,
        "For the draft engine of a target with --tp-size ranks: 1 (every rank has all of it), that "
        "number (each has a share), or auto: what is computed to be faster, which is printed.",
    ),
}
_RARE = (
    "tp_size",
    "draft_tp",
    "tp_invariant",
    "redrafter_draft_len_per_beam",
    "redrafter_greedy_search",
    "max_non_leaves_per_layer",
    "eagle_layers",
)  # shown by --help-all
LIMITS = (  # options that are fields of BuildRequest
    "dtype",
    "max_batch_size",
    "max_seq_len",
    "max_input_len",
    "max_num_tokens",
    "max_beam_width",
    "max_draft_len",
    "speculative_decoding_mode",
    "tokens_per_block",
    "kv_cache_type",
    "kv_cache_dtype",
    "kv_cache_unit_scales",
    "logits_dtype",
    "gather_context_logits",
    *RANK_OPTIONS,
    *MODE_OPTIONS,
)


Sign = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="KEYFILE",
        help="Ed25519 key (OpenSSH or PEM) to sign the engine with; see docs/security.md.",
    ),
]

VisualizeNetwork = Annotated[
    Path | None,
    typer.Option(
        "--visualize-network",
        callback=ending(".txt"),
        help="Also write the network as text to this file.",
        hidden=True,
    ),
]


def read_signing_key(path: Path | None, *, writes_nothing: bool) -> SigningKey | None:
    """The key of --sign. Raises BadKey and MissingPackage, and BadConfig where nothing is built."""
    if path is None:
        return None
    if writes_nothing:
        raise BadConfig("--sign signs an engine; --dry-run and --cache-key write none")
    from llmctl.builder.signing_keys import SigningKey

    return SigningKey.read(path)


def require_one_purpose(
    dry_run: bool, cache_key: bool, gpu: tuple[object, ...], picture: Path | None
) -> None:
    """Raise BadConfig for options that what is asked for leaves without effect. gpu: the options
    that describe one."""
    if any(value is not None for value in gpu) and not dry_run:
        raise BadConfig("--gpu and --gpu-memory are for --dry-run")
    if cache_key and (dry_run or picture is not None):
        option = "--dry-run" if dry_run else "--visualize-network"
        raise BadConfig(f"--cache-key prints a key and plans nothing; it cannot go with {option}")


def require_picture_file(picture: Path | None, output_dir: Path) -> None:
    """Raise BadConfig where --visualize-network cannot be written."""
    if picture is None:
        return
    require_writable(picture)
    if picture.resolve() == output_dir.resolve():
        raise BadConfig(f"--visualize-network and --output-dir are both {output_dir}")


def _refuse_no_limit(path: Path, name: str) -> None:
    """Raise for what files of trtllm-build may hold beside limits, with the reason or place."""
    if name == "plugin_config" or name.replace("-", "_") in OPTIONS:
        raise BadConfig(
            f"{path}: {name!r} is not a limit; plugins are options of the command line",
            fix="llmctl build --help-all has a line on each",
        )
    refuse(f"{path}: {name!r}", name, "build")


def build_request(path: Path | None, given: dict[str, Any]) -> BuildRequest:
    """The limits of the file, with the options given on the command line over them."""
    from llmctl.builder.config import BuildRequest
    from llmctl.quantize.format import read_json, why_no_file

    values: dict[str, Any] = {}
    if path is not None:
        if (why := why_no_file(path)) is not None:
            raise BadConfig(f"--build-config {path} {why}")
        try:
            values = read_json(path)
        except CorruptFile as error:
            raise BadConfig(f"--build-config: {error}") from error
        for name in values:
            _refuse_no_limit(path, name)
    values |= {name: value for name, value in given.items() if value is not None}
    return BuildRequest.from_mapping(values, str(path or "command line"))


def make_load_format(
    name: str,
    seed: int | None,
    role: str | None,
    acceptance: float | None,
    head_qformat: str | None,
    checkpoint_dir: Path,
    *,
    writes_nothing: bool = False,
) -> LoadFormat:
    """The options, and what the checkpoint's own config.json says of a planted model where they
    say nothing. To plan an engine (writes_nothing) a checkpoint without weights will do. Raises
    BadConfig for options of another load format."""
    from llmctl.builder.planted import LoadFormat
    from llmctl.quantize.checkpoint import has_weights
    from llmctl.quantize.format import has_file, read_json

    if name == "auto" and seed is not None:
        raise BadConfig("--seed is for --load-format dummy and planted")
    if name != "planted" and (role, acceptance, head_qformat) != (None, None, None):
        raise BadConfig(
            "--planted-role, --planted-acceptance and --planted-head-qformat are for "
            "--load-format planted"
        )
    chosen: dict[str, Any] = {}
    path = checkpoint_dir / "config.json"
    if name == "planted" and has_file(path):
        own = read_json(path).get("planted")
        if isinstance(own, dict):
            chosen = {key: own[key] for key in ("seed", "role", "acceptance") if key in own}
    given = {"seed": seed, "role": role, "acceptance": acceptance, "head_qformat": head_qformat}
    chosen |= {key: value for key, value in given.items() if value is not None}
    is_planned = name == "auto" and writes_nothing and has_file(path)
    return LoadFormat(name, **chosen, has_files=not is_planned or has_weights(checkpoint_dir))


def make_logger(level: str) -> logging.Logger:
    """A logger to stderr. Raises BadConfig for an unknown level."""
    if level not in LOG_LEVELS:
        raise BadConfig(f"--log-level is {level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logger = logging.Logger("llmctl.build", LOG_LEVELS[level])
    logger.addHandler(logging.StreamHandler(sys.stderr))
    return logger


def with_table_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace `**others` by one option for each row of the tables here and of the plugin table,
    for the parser."""
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())[:-1]
    for name, (kind, text) in (RANK_OPTIONS | DRAFT_OPTIONS | MODE_OPTIONS).items():
        flag = f"--{name.replace('_', '-')}"
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    kind | None, typer.Option(flag, help=text, hidden=name in _RARE)
                ],
            )
        )
    for option in OPTIONS.values():
        values = "|".join("|".join(DTYPES) if v == "model" else v for v in option.accepted)
        text = f"{option.effect}. (default: {option.default})"
        flag = f"--{option.name.replace('_', '-')}"
        annotation = Annotated[
            str | None,
            typer.Option(
                flag,
                help=text,
                metavar=values,
                rich_help_panel="Plugins and features",
                hidden=True,
            ),
        ]
        parameters.append(
            inspect.Parameter(
                option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )

    def build(**values: Any) -> None:
        function(**values)

    give_parameters(build, function, signature, parameters)
    return build
