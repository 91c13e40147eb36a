"""`llmctl quantize --draft-model-dir`: draft heads -> quantized draft heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmctl.errors import Unsupported

if TYPE_CHECKING:
    from llmctl.quantize.format import QuantizationInfo
    from llmctl.quantize.heads.heads import DraftHeads
    from llmctl.quantize.heads.quantizer import HeadsPlan, HeadsResult
    from llmctl.quantize.plan import QuantizeOptions, Source


def quantize_heads(options: QuantizeOptions, folder: Path, as_json: bool) -> None:
    """Quantize the heads in a folder for the target of the options, and print the result."""
    from llmctl.quantize.heads.quantizer import plan_heads
    from llmctl.quantize.plan import open_source

    source = open_source(options)
    heads = next(read for is_it, read in KINDS if is_it(folder))(folder, source)
    result = _run_with_progress(plan_heads(options, source, heads))
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    word = heads.depth_word
    typer.echo(
        f"{result.output_dir}: {result.num_heads} {word}s, {result.output_bytes / 1e6:.3g} MB, "
        f"{result.seconds_s:.1f} s"
    )
    rows = zip(result.positions, result.agreement_before, result.agreement_after, strict=True)
    for depth, (count, before, after) in enumerate(rows):
        shares = "not measured, for the text is nowhere what the target chooses"
        if before is not None and after is not None:
            shares = f"{before:.1%} before, {after:.1%} after, of {count} tokens"
        typer.echo(f"{word} {depth} says what the target chooses: {shares}")


def _run_with_progress(plan: HeadsPlan) -> HeadsResult:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    from llmctl.quantize.heads.quantizer import run_heads

    console = Console(stderr=True, highlight=False)
    options, source = plan.options, plan.source
    console.print(
        f"heads of {plan.heads.source.path}: {source.scheme.qformat} weights and activations; "
        f"{options.calib_size} rows of {source.row_length} tokens from {options.calib_dataset}, "
        f"on {options.device}",
        soft_wrap=True,
    )
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("layers of the target", total=source.model.num_layers)
        return run_heads(plan, lambda done, total: bar.update(task, completed=done))


def _read_medusa(folder: Path, source: Source) -> DraftHeads:
    from llmctl.builder.heads.medusa.checkpoint import SAFE_FILE, open_heads, require_fit
    from llmctl.builder.heads.medusa.layouts import MODULE
    from llmctl.quantize.checkpoint import Checkpoint
    from llmctl.quantize.format import CONFIG_FILE, has_file, read_json
    from llmctl.quantize.heads.heads import DraftHeads
    from llmctl.quantize.heads.medusa import MedusaShape, make_medusa

    found = open_heads(folder, source.checkpoint)
    _require_plain(folder, found.quantization)
    config, layout = source.model.config, found.layout
    require_fit(found, int(config.hidden_size), int(config.vocab_size))
    shape = MedusaShape(
        layout.num_heads,
        layout.num_layers,
        found.hidden_size,
        int(config.vocab_size),
        layout.has_bias,
        layout.output,
    )
    linears = shape.linears()
    described = folder / CONFIG_FILE
    return DraftHeads(
        source=found.beside(Checkpoint(folder, {}, {}, None), layout.num_heads),
        prefix=f"{MODULE}.",
        num_depths=layout.num_heads,
        num_tokens=0,
        depth_word="head",
        linears=linears,
        biases=tuple(p for p in linears if p.startswith("blocks.") and layout.has_bias),
        make=lambda projection, embedding: make_medusa(shape, projection),
        file_name=SAFE_FILE,
        config=read_json(described) if has_file(described) else {},
    )


def _is_redrafter(folder: Path) -> bool:
    from llmctl.builder.heads.redrafter.checkpoint import is_redrafter

    return is_redrafter(folder)


def _read_redrafter(folder: Path, source: Source) -> DraftHeads:
    from llmctl.builder.heads.redrafter.checkpoint import open_head, require_fit
    from llmctl.builder.heads.redrafter.names import DEFAULT_LENGTH
    from llmctl.quantize.checkpoint import Checkpoint
    from llmctl.quantize.format import CONFIG_FILE, read_json
    from llmctl.quantize.heads.heads import DraftHeads
    from llmctl.quantize.heads.redrafter import RecurrentShape, make_redrafter

    head = open_head(folder)
    _require_plain(folder, head.quantization)
    config = source.model.config
    require_fit(head, int(config.hidden_size), int(config.vocab_size))
    num_steps = head.draft_len_per_beam or DEFAULT_LENGTH
    sizes = (head.num_layers, head.hidden_size, head.exit_dim, head.vocab_size)
    shape = RecurrentShape(head.recurrence, *sizes, num_steps)
    linears = {path: head.stored_module(module) for path, module in shape.linears().items()}
    return DraftHeads(
        source=Checkpoint(folder, {}, head.stored(), None),
        prefix="",
        num_depths=num_steps,
        num_tokens=num_steps,
        depth_word="step",
        linears=linears,
        biases=shape.biases(),
        make=lambda projection, embedding: make_redrafter(shape, embedding),
        file_name=head.file_name,
        config=read_json(folder / CONFIG_FILE),
    )


def _is_eagle(folder: Path) -> bool:
    from llmctl.builder.heads.eagle.checkpoint import is_eagle

    return is_eagle(folder)


def _read_eagle(folder: Path, source: Source) -> DraftHeads:
    from llmctl.builder.heads.eagle.checkpoint import check_head, open_head
    from llmctl.builder.heads.eagle.config import DEFAULT_THETA, choose_taps, last_tap
    from llmctl.builder.heads.eagle.names import DEFAULT_LENGTH
    from llmctl.builder.heads.eagle.vocabulary import KEPT, OFFSETS
    from llmctl.builder.rope import read_rope
    from llmctl.quantize.checkpoint import Checkpoint
    from llmctl.quantize.format import CONFIG_FILE, SINGLE_FILE, read_json
    from llmctl.quantize.heads.eagle import EagleShape, make_eagle
    from llmctl.quantize.heads.heads import DraftHeads

    opened, target = open_head(folder), source.model.config
    config, hidden_size, is_first = opened.config, int(target.hidden_size), opened.version == 1
    layers, where = source.model.num_layers, str(config.where)
    taps = (
        last_tap(layers, None) if is_first else choose_taps(config.layer_ids, layers, None, where)
    )
    head = check_head(opened, taps, hidden_size, int(target.vocab_size))
    _require_plain(folder, head.quantization)
    rope = read_rope(config.rope, DEFAULT_THETA, where)
    shape = EagleShape(
        version=head.version,
        num_taps=len(taps),
        tensors={name: info.shape for name, info in head.tensors.items()},
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        norm_epsilon=config.norm_epsilon,
        vocab_size=config.vocab_size,
        windows=head.windows,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        num_steps=DEFAULT_LENGTH,
        rotary=lambda start, stop: rope.table(start, stop, config.head_size),
    )
    stored = {name: info.name for name, info in head.tensors.items()}
    if head.is_reduced:
        stored[KEPT] = opened.tensors[KEPT].name
    infos = {info.name: info for info in opened.tensors.values() if info.name in stored.values()}
    checkpoint = Checkpoint(folder, {}, infos, None, head.held)
    offsets = checkpoint.read(stored[OFFSETS]) if head.is_reduced else None
    linears = shape.linears().items()
    return DraftHeads(
        source=checkpoint,
        prefix="",
        num_depths=DEFAULT_LENGTH,
        num_tokens=DEFAULT_LENGTH,
        depth_word="step",
        linears={p: stored[f"{module}.weight"].removesuffix(".weight") for p, module in linears},
        biases=("fc",) if head.has_fc_bias else (),
        make=lambda projection, embedding: make_eagle(shape, projection, embedding, offsets),
        file_name=SINGLE_FILE,
        config=read_json(folder / CONFIG_FILE),
        kept={path: stored[f"{path}.weight"] for path in shape.kept()},
        copied=(stored[OFFSETS], stored[KEPT]) if head.is_reduced else (),
        taps=() if is_first else taps,  # what the last layer puts out is read behind its norm
        attends=True,
    )


def _require_plain(folder: Path, quantization: QuantizationInfo | None) -> None:
    if quantization is not None:
        raise Unsupported(
            f"{folder} is quantized already ({quantization.algo})",
            fix="start from the heads as they were trained",
        )


KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Any], Any]], ...] = (
    (_is_redrafter, _read_redrafter),
    (_is_eagle, _read_eagle),
    (lambda folder: True, _read_medusa),
)
"""(whether a folder holds such heads, how they are read); the first that does."""
