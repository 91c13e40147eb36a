"""The help of every command: one screen of common options, the others with --help-all.

An option is hidden (`typer.Option(..., hidden=True)`) if it is rarely needed; --help-all shows it.
Options with a `rich_help_panel` get a section of that name. The lines after "Examples:" in a
docstring are command lines that work from the root of the repository.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

WIDTH = 100  # columns; fewer in a narrower terminal
NAMES_WIDTH = 34  # columns of option names; longer ones get a line of their own
LEAST_WIDTH = NAMES_WIDTH + 26  # a terminal that is narrower still folds the lines
_KINDS = {  # what the parser calls a value -> what is shown
    "int range": "N",
    "int": "N",
    "float range": "X",
    "float": "X",
    "path": "PATH",
    "str": "TEXT",
    "list[str]": "TEXT...",
    "list[int]": "N...",
}
_BOUNDS = re.compile(r"x[<>]=?|[^ ]+<=?x<")


def show_all(context: typer.Context, is_wanted: bool) -> None:
    """Callback of --help-all: prints the help with every option and ends the program."""
    if is_wanted:
        typer.echo(render(context.command, context, has_hidden=True))
        raise typer.Exit()


def render(command: Any, context: Any, has_hidden: bool = False) -> str:
    """The help text of a command or of a group of commands."""
    columns = max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 50)).columns))
    return "\n".join(_lines(command, context, columns, has_hidden))


def _lines(command: Any, context: Any, columns: int, has_hidden: bool) -> Iterator[str]:
    text, _, examples = (command.help or "").partition("Examples:")
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"Usage: {context.command_path} {pieces}"
    for paragraph in text.strip().split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), columns)
    hidden = 0
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(context):
        if getattr(param, "hidden", False) and not has_hidden:
            hidden += 1
            continue
        is_option = param.param_type_name == "option"
        title = getattr(param, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
        sections.setdefault(title, []).append(record(param, context))
    children = getattr(command, "commands", {})
    if children:
        sections["Commands"] = [
            (name, child.get_short_help_str(columns)) for name, child in children.items()
        ]
    for title, records in sections.items():
        yield from ("", f"{title}:")
        for names, words in records:
            yield from _entry(names, words, columns)
    if examples.strip():
        yield from ("", "Examples:", textwrap.indent(textwrap.dedent(examples.strip("\n")), "  "))
    if hidden:
        yield from ("", f"{hidden} more options: {context.command_path} --help-all")


def record(param: Any, context: Any) -> tuple[str, str]:
    """(names and kind of value, help) of a parameter, hidden or not."""
    was_hidden = getattr(param, "hidden", False)
    if was_hidden:
        param.hidden = False
    names, words = param.get_help_record(context)
    if was_hidden:
        param.hidden = True
    names = re.sub(r"<([^>]*)>", lambda kind: _KINDS.get(kind[1], kind[1]), names)
    first, _, kind = names.partition(" ")
    if first == kind or param.param_type_name == "argument":  # its name says what it may be
        names = first
    extra = re.search(r" *\[([^]]*)\]$", words)
    if extra is not None:  # bounds explain themselves when they are broken
        shown = "; ".join(part for part in extra[1].split("; ") if not _BOUNDS.match(part))
        words = words[: extra.start()] + (f" [{shown}]" if shown else "")
    return names, words.strip()


def _entry(names: str, words: str, columns: int) -> Iterator[str]:
    """Lines of one option: its help beside its names, or below when they are long."""
    indent = " " * (NAMES_WIDTH + 2)
    wrapped = textwrap.wrap(words, columns - len(indent)) or [""]
    first = f"  {names}"
    if len(first) > NAMES_WIDTH:
        yield first
    else:
        yield f"{first.ljust(NAMES_WIDTH)}  {wrapped.pop(0)}".rstrip()
    yield from (f"{indent}{line}".rstrip() for line in wrapped if line)
