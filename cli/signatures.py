"""Functions whose parameters are made at run time, for typer to parse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer


def give_parameters(
    call: Callable[..., Any],
    like: Callable[..., Any],
    signature: inspect.Signature,
    parameters: Sequence[inspect.Parameter],
) -> None:
    """Give `call` the docstring of `like`, and its signature with these parameters."""
    call.__doc__ = like.__doc__
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    # what inspect and typer read
    vars(call)["__signature__"] = signature.replace(parameters=parameters)


def refuse_empty_paths(parameters: Iterable[inspect.Parameter]) -> None:
    """Have the parser refuse "" for every path: it would become `Path(".")`, and an unset variable
    in `--engine-dir "$ENGINE"` the folder that the shell happens to be in."""
    for parameter in parameters:
        if get_origin(parameter.annotation) is not Annotated:
            continue
        kind, info = get_args(parameter.annotation)[:2]
        if kind is Path or Path in get_args(kind):
            info.parser = _path
            info.metavar = info.metavar or "PATH"


def _path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)
