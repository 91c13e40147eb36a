"""Options that take a list (`--input_text a b c`), which the option parser does not support.

They are rewritten before parsing: to repeated options, or to one JSON list if each occurrence has
its own meaning. The joined form `--name=value` keeps values that look like options.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from llmctl.errors import BadConfig


def expand_lists(
    argv: Sequence[str], *, repeated: Collection[str] = (), grouped: Collection[str] = ()
) -> list[str]:
    """Rewrite `--name a b` to `--name=a --name=b` (repeated) or `--name=["a", "b"]` (grouped).

    Names are written with hyphens. A list ends at the next word that begins with two hyphens. A
    literal `--` ends the rewriting. Raises BadConfig for a name without a value.
    """
    result: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "--":
            return [*result, word, *argv[position:]]
        name, joined, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in repeated and name not in grouped:
            result.append(word)
            continue
        values = [value] if joined else []
        while position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        if not values:  # the parser would use the next option as the value
            found = f", as {argv[position]} is read as an option" if position < len(argv) else ""
            raise BadConfig(
                f"{name} is given without a value{found}",
                fix=f"a value that begins with -- is joined: {name}=VALUE",
            )
        if name in grouped:
            result.append(f"{name}={json.dumps(values)}")
        else:
            result += [f"{name}={item}" for item in values]
    return result
