"""Functions whose parameters are made at run time, for typer to parse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


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
