"""`llmctl doctor`: this machine, and which backends work on it."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from llmctl.cli.table import size, table
from llmctl.errors import NoDevice


class BackendName(enum.StrEnum):
    """Backends that may be asked for."""

    cuda = "cuda"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"
    cpu = "cpu"


def doctor(
    backend: Annotated[
        BackendName | None,
        typer.Option(
            "--backend",
            metavar="cuda|tensorrt|tensorrt-rtx|cpu",
            help="Fail unless this one builds and runs here. (default: any)",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
) -> int:
    """Show what this machine has, which backends build and run engines, and why others do not.

    Exits with 0 where a backend (or the one asked for) both builds and runs, else with 3.

    Examples:
      llmctl doctor
      llmctl doctor --backend cpu --json
    """
    found = examine()
    typer.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))
    wanted = [b for b in found["backends"] if backend is None or b["name"] == backend]
    works = any(b["build"]["ok"] and b["run"]["ok"] for b in wanted)
    return 0 if works else NoDevice.exit_code


def examine() -> dict[str, Any]:
    """The object that `--json` prints."""
    from llmctl.cli.doctor.backends import check_backends, check_quantize
    from llmctl.cli.doctor.machine import (
        describe_driver,
        describe_gpus,
        describe_machine,
        libraries,
    )

    driver, gpus = describe_driver(), describe_gpus()
    backends = check_backends(gpus, driver["cuda"])
    return {
        "machine": describe_machine(),
        "driver": driver,
        "gpus": gpus,
        "libraries": libraries(),
        "backends": [asdict(backend) for backend in backends],
        "quantize": asdict(check_quantize()),
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    machine, driver = found["machine"], found["driver"]
    yield "machine"
    rows = [
        ("system", f"{machine['system']}, Python {machine['python']}"),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("memory", f"{size(machine['memory_free_bytes'])} of {size(machine['memory_bytes'])} free"),
        ("disk", f"{size(machine['disk_free_bytes'])} free in {machine['folder']}"),
        ("driver", _driver(driver)),
    ]
    rows += [
        (
            "GPU",
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, "
            f"{size(gpu['memory_free_bytes'])} of {size(gpu['memory_bytes'])} free",
        )
        for gpu in found["gpus"]
    ]
    yield from table(rows)
    yield from ("", "libraries")
    yield from table([(name, text or "not installed") for name, text in found["libraries"].items()])
    yield from ("", "backends")
    yield from table([row for backend in found["backends"] for row in _backend_rows(backend)])
    yield from ("", "quantize")
    yield from table([row[2:] for row in _check_rows("", "", found["quantize"])])


def _driver(driver: Mapping[str, str | None]) -> str:
    if driver["cuda"] is None:
        return "no NVIDIA driver"
    return f"NVIDIA {driver['version'] or 'of unknown version'}, CUDA {driver['cuda']}"


def _backend_rows(backend: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    build, run = backend["build"], backend["run"]
    if build == run:
        yield from _check_rows(backend["name"], "build, run", build)
    else:
        yield from _check_rows(backend["name"], "build", build)
        yield from _check_rows("", "run", run)


def _check_rows(name: str, what: str, check: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield name, what, "yes" if check["ok"] else "no", check["detail"]
    if check["fix"]:
        yield "", "", "", f"fix: {check['fix']}"
