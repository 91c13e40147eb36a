"""`--config FILE`: a YAML file of a command's options, under their own names.

    checkpoint-dir: out/target-fp8        # or checkpoint_dir
    max_draft_len: 4
    input_text: [first prompt, second]    # options that may be repeated take a list

Values are checked as on the command line, and the command line overrides them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llmctl.errors import BadConfig

_NOT_IN_FILES = ("config", "help", "help-all")


def read_config(path: Path, command: Any, grouped: Collection[str] = ()) -> dict[str, Any]:
    """Defaults by parameter for the parser.

    grouped: options whose occurrences are lists themselves, passed on as JSON. Raises BadConfig
    for a file that is no mapping, a key that is no option (naming the nearest that is), and a value
    of the wrong kind.
    """
    params = {name: param for param in command.params for name in _names(param)}
    found: dict[str, Any] = {}
    for key, value in _read_yaml(path).items():
        name = str(key).replace("_", "-")
        param = params.get(name)
        if param is None:
            raise BadConfig(
                f"{path}: {key!r} is not an option of `{command.name}`", fix=_fix(name, params)
            )
        if param.name in found:
            raise BadConfig(f"{path}: {key!r} sets --{name} a second time")
        found[param.name] = _value(value, param, f"{path}: {key}", f"--{name}" in grouped)
    return found


def given_path(argv: Sequence[str]) -> Path | None:
    """The file named on a command line, before parsing; the last one if there are several."""
    found = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, joined, value = word.partition("=")
        if name == "--config":
            found = Path(value if joined else following)
    return found


def asks_for_json(argv: Sequence[str]) -> bool:
    """Whether the file of a command line turns --json on; False if it cannot be read, which is
    reported when the command is parsed."""
    path = given_path(argv)
    if path is None:
        return False
    try:
        return _read_yaml(path).get("json") is True
    except (OSError, BadConfig):
        return False


def _names(param: Any) -> list[str]:
    """What a file may call a parameter: its long names; for an argument, its name."""
    if param.param_type_name == "argument":
        return [param.name.replace("_", "-")]
    names = [option.removeprefix("--") for option in param.opts if option.startswith("--")]
    return [name for name in names if name not in _NOT_IN_FILES]


def _fix(name: str, params: dict[str, Any]) -> str:
    nearest = get_close_matches(name, params, n=1, cutoff=0.0)
    return f"the nearest option is {nearest[0]}"


def _read_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    if not path.is_file():
        why = "is not a file" if path.exists() else "does not exist"
        raise BadConfig(f"--config {path} {why}")
    text = path.read_bytes()
    try:
        values = yaml.safe_load(text)
        json.dumps(values, default=str)  # an anchor may hold itself
        _require_each_once(yaml.compose(text, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # also a 13th month
        raise BadConfig(f"{path} is not YAML of options: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadConfig(f"{path} holds a YAML {type(values).__name__}; options by name are wanted")
    return values


def _require_each_once(root: Any) -> None:
    """YAML silently keeps the last of two equal keys. Raises ValueError."""
    keys = [key.value for key, _ in root.value] if root is not None and root.id == "mapping" else []
    twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is there twice")


def _value(value: Any, param: Any, where: str, is_grouped: bool) -> Any:
    """A value as the parser takes it: text for it to convert, or a flag's true or false."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise BadConfig(f"{where} is {value!r}; it must be true or false")
        return value
    if not getattr(param, "multiple", False):
        return _text(value, where)
    items = value if isinstance(value, list) else [value]
    if not is_grouped:
        return [_text(item, where) for item in items]
    groups = items if items and all(isinstance(item, list) for item in items) else [items]
    return [json.dumps([_text(word, where) for word in group]) for group in groups]


def _text(value: Any, where: str) -> str:
    if value is None or isinstance(value, dict | list):
        shown = "nothing" if value is None else json.dumps(value)
        raise BadConfig(f"{where} is {shown}; one value is wanted", fix="put it in quotes")
    return str(value).lower() if isinstance(value, bool) else str(value)
