"""What `llmctl build` does last: write the engine, and say on stdout what came out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmctl.cli.table import size

if TYPE_CHECKING:
    from llmctl.builder.build import EnginePlan


def print_key(engine: EnginePlan, as_json: bool) -> None:
    """What equal engines share."""
    from llmctl.builder.cache_key import cache_key

    key = cache_key(engine)
    typer.echo(json.dumps({"cache_key": key}) if as_json else key)


def write_engine(engine: EnginePlan, output_dir: Path, *, with_progress: bool) -> None:
    """Build it; with_progress: a bar on stderr. Raises what `run_build` raises."""
    from llmctl.builder.build import run_build

    if not with_progress:
        run_build(engine, output_dir)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=engine.file_bytes * engine.limits.tp_size)
        run_build(engine, output_dir, lambda num_bytes: bar.advance(task, num_bytes))


def print_result(engine: EnginePlan, output_dir: Path, seconds: float, as_json: bool) -> None:
    """One line, for people or as JSON."""
    summary = engine.summary() | {"output_dir": str(output_dir)}
    if as_json:
        typer.echo(json.dumps(summary | {"seconds_s": seconds}))
    else:
        elapsed = time.strftime("%H:%M:%S", time.gmtime(seconds))
        typer.echo(f"{output_dir}: {size(summary['engine_bytes'])} in {elapsed}")
