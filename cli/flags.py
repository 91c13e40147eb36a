"""Flags that were given a value: `--streaming true`, `--kv-cache-enable-block-reuse=false`.

The parser takes such a value for another argument, and its message does not name the flag. A flag
is on where its name is typed; one that is on by default has a `--no-...` form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_ON = ("true", "yes", "on", "1", "enable", "enabled")
_OFF = ("false", "no", "off", "0", "disable", "disabled")
# What the parser says of a value that no option takes.
_LEFT_OVER = re.compile(r"unexpected extra argument|No such command|does not take a value")


def flag_with_value(command: Any, message: str, argv: Sequence[str]) -> tuple[str, str] | None:
    """(message, fix) for a usage error of a command, and its message, that comes of a value behind
    a flag; None for any other."""
    if not _LEFT_OVER.search(message):
        return None
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
            return found, _fix(flags[name], name, value.lower())
    return None


def _fix(param: Any, name: str, value: str) -> str:
    """What to type for what the value asks for."""
    on, off = param.opts[-1], next(iter(param.secondary_opts), None)
    turned_off = f"type {off}, which is the form that turns it off" if off else f"leave {on} out"
    if value in _ON or value in _OFF:
        is_on = (value in _ON) == (name in param.opts)
        return f"type {on} alone" if is_on else turned_off
    return f"type {on} alone, or {off} to turn it off" if off else f"type {on} alone"
