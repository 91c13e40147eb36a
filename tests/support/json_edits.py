"""Edits of a tree of JSON: of plans, headers and config files of engines."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

ACTIONS = ("set", "set", "copy", "copy", "delete", "repeat", "move", "add")
Edit = tuple[str, int, int, Any]  # action, where, where else, value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or index) of every value within."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for key, item in items:
        yield value, key
        if isinstance(item, list | dict):
            yield from places(item)


def apply(root: Any, edit: Edit) -> None:
    """Change one value. The edit's own value stays as it is: another edit may have the same."""
    action, where, other, value = deepcopy(edit)
    known = list(places(root))
    if not known:
        return
    holder, key = known[where % len(known)]
    if action == "set":
        holder[key] = value
    elif action == "copy":
        source, at = known[other % len(known)]
        if type(source[at]) is type(holder[key]) and not isinstance(source[at], list | dict):
            holder[key] = source[at]
    elif action == "delete":
        del holder[key]
    elif action == "add" and isinstance(holder, dict):
        holder[f"more{other % 3}"] = value
    elif isinstance(holder, list) and action in ("repeat", "move", "add"):
        item = deepcopy(holder[key]) if action == "repeat" else holder.pop(key)
        holder.insert(other % (len(holder) + 1), value if action == "add" else item)
