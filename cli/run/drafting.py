"""The options of drafting methods on the command line, from their table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from typer import Option

from llmctl.cli.signatures import give_parameters
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.methods import choose_method, how_to_draft, method_options

NAMES = [option.name for option in method_options()]


def parameters() -> dict[str, Any]:
    """Every method's options as typer takes them: name -> annotation. All are None by default."""
    return {
        option.name: Annotated[
            option.kind | None,
            Option(*option.flags, help=option.help, hidden=option.is_hidden),
        ]
        for option in method_options()
    }


def with_method_options(function: Callable[..., int]) -> Callable[..., int]:
    """Put the methods' options in the place of a function's `**drafting`, for the parser."""
    signature = inspect.signature(function, eval_str=True)
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in parameters().items()
    ]
    given = list(signature.parameters.values())[:-1]
    place = next(i for i, parameter in enumerate(given) if parameter.name == "draft_len")
    # By keyword alone, so that their place in the help is free.
    given = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in given]

    def command(**values: Any) -> int:
        return function(**values)

    give_parameters(command, function, signature, [*given[:place], *ours, *given[place:]])
    return command


def parse_method(given: dict[str, Any], draft_len: int | None, *, is_adaptive: bool) -> DraftMethod:
    """The method that the options ask for. Raises BadConfig, Unsupported."""
    method = choose_method({name: given[name] for name in NAMES}, draft_len)
    if is_adaptive:
        require_drafts("--adaptive-draft-len is given without a draft", method)
    return method


def require_drafts(what: str, method: DraftMethod) -> None:
    """Raises BadConfig where nothing is drafted."""
    if not method.is_drafting:
        raise BadConfig(what, fix=how_to_draft())
