"""Mistakes that the parser's own messages do not name: what was meant, and what to type.

- Flags that were given a value: `--streaming true`, `--kv-cache-enable-block-reuse=false`. A flag
  is on where its name is typed; one that is on by default has a `--no-...` form.
- Options on the wrong side of a command: `dataset text --tokenizer DIR`, `bench --engine-dir DIR
  latency`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llmctl.cli.app import command_path, find_command

_ON = ("true", "yes", "on", "1", "enable", "enabled")
_OFF = ("false", "no", "off", "0", "disable", "disabled")
# What the parser says of a value that no option takes, and of an option that a command has not.
_LEFT_OVER = re.compile(r"unexpected extra argument|No such command|does not take a value")
_NO_OPTION = re.compile(r"No such option:? '?(--[\w-]+)")


def explain(message: str, argv: Sequence[str]) -> tuple[str, str] | None:
    """(message, fix) for the parser's message about a command line; None where that says it all."""
    path = command_path(list(argv))
    if _LEFT_OVER.search(message):
        return _flag_with_value(find_command(path), argv)
    unknown = _NO_OPTION.match(message)
    return None if unknown is None else _misplaced(unknown[1], path)


def _flag_with_value(command: Any, argv: Sequence[str]) -> tuple[str, str] | None:
    flags = {
        name: param
        for param in command.params
        if getattr(param, "is_flag", False)
        for name in (*param.opts, *param.secondary_opts)
    }
    for typed, following in zip(argv, [*argv[1:], ""], strict=True):
        word, joined, value = typed.partition("=")
        name, value = word.replace("_", "-"), value if joined else following
        if name in flags and (joined or value.lower() in (*_ON, *_OFF)):
            found = f"{word} is a flag and takes no value; found {value!r}"
            return found, _without_value(flags[name], name, value.lower())
    return None


def _without_value(param: Any, name: str, value: str) -> str:
    """What to type for what the value asks for."""
    on, off = param.opts[-1], next(iter(param.secondary_opts), None)
    turned_off = f"type {off}, which is the form that turns it off" if off else f"leave {on} out"
    if value in _ON or value in _OFF:
        is_on = (value in _ON) == (name in param.opts)
        return f"type {on} alone" if is_on else turned_off
    return f"type {on} alone, or {off} to turn it off" if off else f"type {on} alone"


def _misplaced(option: str, path: str) -> tuple[str, str] | None:
    command = find_command(path)
    above, _, own = path.rpartition(" ")
    if _has(command, option):  # so it was typed before the command
        return f"{option} is an option of `{path}`", f"type it after {own}: {path} {option} ..."
    if above and _has(find_command(above), option):
        found = f"{option} is an option of `{above}`, for all of its commands"
        return found, f"type it before {own}: {above} {option} ... {own} ..."
    children = getattr(command, "commands", {})
    having = [name for name, child in children.items() if _has(child, option)]
    if not having:
        return None
    found = f"{option} is an option of {' and '.join(f'`{path} {name}`' for name in having)}"
    return found, f"type it after the command: {path} {having[0]} {option} ..."


def _has(command: Any, option: str) -> bool:
    return any(option in param.opts for param in command.params)
