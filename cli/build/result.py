"""The end of `llmctl build`: write the engine, and print the result on stdout."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmctl.cli.table import size

if TYPE_CHECKING:
    from llmctl.builder.engine_plan import EnginePlan
    from llmctl.builder.signing_keys import SigningKey


def print_key(engine: EnginePlan, as_json: bool) -> None:
    """What equal engines share."""
    from llmctl.builder.cache_key import cache_key

    key = cache_key(engine)
    typer.echo(json.dumps({"cache_key": key}) if as_json else key)


def write_engine(
    engine: EnginePlan, output_dir: Path, key: SigningKey | None, *, with_progress: bool
) -> None:
    """Build it, signed where there is a key; with_progress: a bar on stderr.

    Raises what `run_build` raises.
    """
    from llmctl.builder.build import run_build

    if not with_progress:
        run_build(engine, output_dir, key=key)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=engine.file_bytes * engine.limits.tp_size)
        run_build(engine, output_dir, lambda num_bytes: bar.advance(task, num_bytes), key)


def print_result(
    engine: EnginePlan, output_dir: Path, key: SigningKey | None, seconds: float, as_json: bool
) -> None:
    """One line, for people or as JSON."""
    signed_by = None if key is None else key.public.fingerprint
    ranks = engine.limits.tp_size
    summary = engine.summary() | {
        "num_ranks": ranks,
        "output_dir": str(output_dir),
        "signed_by": signed_by,
    }
    if as_json:
        typer.echo(json.dumps(summary | {"seconds_s": seconds}))
    else:
        signed = "" if signed_by is None else f", signed by {signed_by}"
        elapsed = time.strftime("%H:%M:%S", time.gmtime(seconds))
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        typer.echo(f"{output_dir}: {size(summary['engine_bytes'])}{each} in {elapsed}{signed}")
