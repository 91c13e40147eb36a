"""`llmctl inspect`: what an engine directory or a checkpoint folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmctl.cli import engine_options as engine
from llmctl.cli.output_files import replacing, require_writable
from llmctl.cli.streams import json_line
from llmctl.errors import BadConfig, EngineNotFound

GRAPH_SUFFIXES = (".html", ".dot")


def inspect(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="An engine directory or a checkpoint folder.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="Predict times for this GPU: h200, h100, ... (default: the one here)",
        ),
    ] = None,
    read_bandwidth: Annotated[
        float | None,
        typer.Option(
            "--read-bandwidth",
            min=0.001,
            max=1e6,
            metavar="GB/S",
            help="Predict times for a memory that reads so many GB/s, of a CPU for example.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", min=1, help="Tokens of the step: 1 decodes, draft_len + 1 verifies."
        ),
    ] = 1,
    context_len: Annotated[
        int, typer.Option("--context-len", min=0, help="Tokens in the KV cache before the step.")
    ] = 1000,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph", help="Also draw the engine's operators: a page (.html) or Graphviz (.dot)."
        ),
    ] = None,
    trusted_builder: engine.TrustedBuilder = None,
    check_weights: Annotated[
        bool,
        typer.Option(
            "--check-weights",
            help="With --trusted-builder: read the weights, too, about a second a gigabyte.",
            hidden=True,
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check all that opening the engine checks, kernels and their launches included.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
) -> None:
    """Show what an engine or a checkpoint holds; no weight is read.

    Engines: origin, limits, memory, and the operators of a step by layer: what each fuses and
    reads, and its predicted time, bytes read / (bandwidth x the share of it that steps of that
    size reach, as measured). Checkpoints: tensors, dtypes, quantization and its scales.

    Examples:
      llmctl inspect out/target --read-bandwidth 20 --graph out/target.html
      llmctl inspect out/target-fp8
      llmctl inspect out/target --json
    """
    if graph is not None and graph.suffix not in GRAPH_SUFFIXES:
        raise BadConfig(f"--graph {graph}: its name must end in {' or '.join(GRAPH_SUFFIXES)}")
    if graph is not None:
        require_writable(graph)
    if check_weights and trusted_builder is None:
        raise BadConfig("--check-weights is given without --trusted-builder")
    if not path.is_dir():
        is_file = path.exists()
        wanted = "an engine directory or a checkpoint folder"
        raise EngineNotFound(
            f"{path} {'is a file' if is_file else 'does not exist'}; {wanted} is wanted",
            fix=f"give {path.parent if is_file else wanted}",
        )
    if _is_checkpoint(path):
        names = ("graph", "gpu", "read_bandwidth", "tokens", "context_len", "trusted_builder")
        for name in (*names, "verify"):
            if _is_given(context, name):
                option = f"--{name.replace('_', '-')}"
                raise BadConfig(f"{option} is for engines, and {path} is a checkpoint")
        described, lines = _checkpoint(path)
    else:
        from llmctl.builder.signature import require_signed
        from llmctl.builder.signing_keys import PublicKey
        from llmctl.cli.inspect.cost import Step
        from llmctl.cli.inspect.engine import describe_engine
        from llmctl.cli.inspect.engine_text import engine_text

        if trusted_builder is not None:
            require_signed(path, PublicKey.read(trusted_builder), with_weights=check_weights)
        described = describe_engine(path, Step(tokens, context_len), gpu, read_bandwidth)
        if trusted_builder is not None:
            described["signature"]["state"] = "trusted"
        if verify:
            from llmctl.cli.inspect.verify import verify_engine

            described["verified"] = verify_engine(path)
        limits = described["config"]["build_config"]
        for option, value, limit in (
            ("--context-len", context_len, "max_seq_len"),
            ("--tokens", tokens, "max_num_tokens"),
        ):
            if _is_given(context, option[2:].replace("-", "_")) and value > limits[limit]:
                raise BadConfig(f"{option} is {value}; the engine's {limit} is {limits[limit]}")
        if graph is not None:
            _draw(graph, described)
        lines = list(engine_text(described))
    typer.echo(json_line(described) if as_json else "\n".join(lines))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _is_checkpoint(folder: Path) -> bool:
    """A folder with weights in safetensors files; an engine keeps its own under another name."""
    return any(folder.glob("*.safetensors"))


def _checkpoint(folder: Path) -> tuple[dict[str, Any], list[str]]:
    from llmctl.cli.inspect.checkpoint import describe_checkpoint
    from llmctl.cli.inspect.checkpoint_text import checkpoint_text

    described = describe_checkpoint(folder)
    return described, list(checkpoint_text(described))


def _draw(path: Path, engine: dict[str, Any]) -> None:
    if path.suffix == ".dot":
        from llmctl.cli.inspect.dot import draw
    else:
        from llmctl.cli.inspect.page import draw
    with replacing(path, "w") as file:
        file.write(draw(engine))
