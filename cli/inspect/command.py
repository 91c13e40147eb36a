"""`llmctl inspect`: what an engine directory holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    path: Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="An engine directory.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
) -> None:
    """Show what an engine was built from and for, its operators, kernels and memory."""
    from llmctl.cli.inspect.engine import describe_engine
    from llmctl.cli.inspect.engine_text import engine_text

    described = describe_engine(path)
    if as_json:
        typer.echo(json.dumps(described, ensure_ascii=False, allow_nan=False))
    else:
        typer.echo("\n".join(engine_text(described)))
