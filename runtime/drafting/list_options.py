"""run.py's options that contain a list in a string, parsed strictly."""

from __future__ import annotations

import ast
from typing import Any

from llmctl.errors import BadConfig, Unsupported


def parse_list(option: str, text: str, length: int, form: str) -> list[Any]:
    """Parse `text` as a list of so many values. Raises BadConfig."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list) or len(value) != length:
        raise BadConfig(f"{option} is {text!r}; it must have the form {form}")
    return value


def take_device(option: str, devices: object, role: str) -> list[str]:
    """Check a list of devices; lines for people where it names more than one.

    An engine on a GPU has one rank, which runs on device 0; the ranks of an engine on a CPU are
    processes and have no device. So the devices behind the first are never looked at. Raises
    BadConfig for what is no list of devices, Unsupported where the first is not 0.
    """
    if not isinstance(devices, list) or not all(
        type(device) is int and device >= 0 for device in devices
    ):
        raise BadConfig(f"{option} has the devices {devices!r}; a list such as [0] is wanted")
    if len(set(devices)) < len(devices):
        raise BadConfig(f"{option} names a device twice: {devices}")
    if devices[:1] != [0]:
        raise Unsupported(
            f"{option} names the devices {devices} for the {role}; engines run on device 0",
            fix="let the list begin with 0, as [0] does",
        )
    if len(devices) == 1:
        return []
    return [
        f"of the devices {devices} for the {role} a GPU's engine takes the first; a CPU's has none"
    ]


def positive(option: str, name: str, value: object) -> int:
    """The value, an integer of at least 1. Raises BadConfig."""
    if type(value) is not int or value < 1:
        raise BadConfig(f"{name} in {option} is {value!r}; it must be an integer >= 1")
    return value


def require_equal_length(
    option: str, found: int, draft_len: int | None, other: str = "--draft-len"
) -> None:
    """Raises BadConfig if the other option is given with a different length."""
    if draft_len is not None and draft_len != found:
        raise BadConfig(
            f"{option} says draft_len {found}, {other} says {draft_len}",
            fix="give one length, or the same in both",
        )
