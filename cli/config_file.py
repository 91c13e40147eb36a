"""`--config FILE`: a YAML file of a command's options, under their own names.

    checkpoint-dir: out/target-fp8        # or checkpoint_dir
    max_draft_len: 4
    input_text: [first prompt, second]    # options that may be repeated take a list

Values are checked as on the command line, and the command line overrides them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from llmctl.cli.refused import refuse
from llmctl.errors import BadConfig
from llmctl.quantize.format import shown

_NOT_IN_FILES = ("config", "help", "help-all")
_MOST_BYTES = 256 << 10  # YAML is read slowly: a second or two
_MOST_NODES = 20_000
_KINDS = {"scalar": "value", "sequence": "list"}
# What plain words and brackets are; YAML finds numbers and dates in words, which stay words here.
_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "value", "seq", "map")


def read_config(
    path: Path, command: Any, grouped: Collection[str] = (), above: Any = None
) -> dict[str, Any]:
    """Defaults by parameter for the parser.

    grouped: options whose occurrences are lists themselves, passed on as JSON. above: the command
    that this one is of. Raises BadConfig for a file that is no mapping, a key that is no option
    (naming the command that has it, or the nearest that is), and a value of the wrong kind;
    Unsupported for an option of TensorRT-LLM's that is refused.
    """
    params = {name: param for param in command.params for name in _names(param)}
    found: dict[str, Any] = {}
    for key, value in _read_yaml(path).items():
        name = key.replace("_", "-")
        param = params.get(name)
        if param is None:
            for owner in (command, above):
                refuse(f"{path}: {shown(key)}", name, getattr(owner, "name", None) or "")
            raise BadConfig(
                f"{path}: {shown(key)} is not an option of `{command.name}`",
                fix=_fix(name, params, command, above),
            )
        if param.name in found:
            raise BadConfig(f"{path}: {shown(key)} sets --{name} a second time")
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
        return getattr(_read_yaml(path).get("json"), "flag", None) is True
    except (OSError, BadConfig):
        return False


def _names(param: Any) -> list[str]:
    """What a file may call a parameter: its long names; for an argument, its name."""
    if param.param_type_name == "argument":
        return [param.name.replace("_", "-")]
    names = [option.removeprefix("--") for option in param.opts if option.startswith("--")]
    return [name for name in names if name not in _NOT_IN_FILES]


def _fix(name: str, params: Mapping[str, Any], command: Any, above: Any) -> str:
    """Where an option belongs that this command has not."""
    children = getattr(command, "commands", {}).items()
    having = [f"`{command.name} {other}`" for other, child in children if _has(child, name)]
    if having:
        return f"it is an option of {' and '.join(having)}: type --config FILE after the command"
    if above is not None and _has(above, name):
        return f"it is an option of `{above.name}`: type it before {command.name}"
    nearest = get_close_matches(name, params, n=1, cutoff=0.0)
    return f"the nearest option is {nearest[0]}"


def _has(command: Any, name: str) -> bool:
    return any(name in _names(param) for param in command.params)


def _read_yaml(path: Path) -> dict[str, Any]:
    """The file's options: texts as they are written, lists, and objects, which no option takes.

    Only the tree of the document is read; none of its tags makes a value. So 010 is what the same
    letters are on the command line, and not the number 8 that YAML would have it be.
    """
    import yaml

    from llmctl.quantize.format import why_no_file

    if (why := why_no_file(path)) is not None:
        raise BadConfig(f"--config {path} {why}")
    if path.stat().st_size > _MOST_BYTES:
        raise BadConfig(f"{path} has {path.stat().st_size} bytes; at most {_MOST_BYTES} are read")
    try:
        root: Any = yaml.compose(path.read_bytes(), yaml.SafeLoader)
        if root is None:
            return {}
        if root.id != "mapping":
            raise BadConfig(f"{path} holds a YAML {_KINDS[root.id]}; options by name are wanted")
        tree = _Tree()
        pairs = [(str(tree.value(key)), value) for key, value in root.value]
        _require_each_once([key for key, _ in pairs])
        return {key: tree.value(value) for key, value in pairs}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise BadConfig(f"{path} is not YAML of options: {reason}") from error


class _Word(str):
    """A scalar as it is written; `flag` is what YAML takes it for where that is true or false."""

    flag: bool | None = None


class _Tree:
    """Reads the nodes of a document. Raises ValueError for what is no word, list or object, and
    where aliases make more of it than anybody wrote."""

    def __init__(self) -> None:
        from yaml.constructor import SafeConstructor

        self._num_nodes = 0
        self._values = SafeConstructor()

    def value(self, node: Any, above: tuple[Any, ...] = ()) -> Any:
        """A word, None for null, a list, or an object."""
        self._num_nodes += 1
        if self._num_nodes > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES} values, repeated aliases among them")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in _TAGS:
            raise ValueError(f"the tag {shown(node.tag)} is not read")
        if any(node is parent for parent in above):
            raise ValueError("Circular: an anchor holds itself")
        if node.id == "sequence":
            return [self.value(item, (*above, node)) for item in node.value]
        if node.id == "mapping":
            above = (*above, node)
            return {
                str(self.value(key, above)): self.value(value, above) for key, value in node.value
            }
        if kind == "null":
            return None
        if kind in ("int", "timestamp"):
            self._values.construct_object(node)  # ValueError for a 13th month
        word = _Word(node.value)
        if kind == "bool":
            word.flag = node.value.lower() in ("true", "yes", "on")
        return word


def _require_each_once(keys: list[str]) -> None:
    """YAML silently keeps the last of two equal keys. Raises ValueError."""
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{shown(twice)} is there twice")


def _value(value: Any, param: Any, where: str, is_grouped: bool) -> Any:
    """A value as the parser takes it: text for it to convert, or a flag's true or false."""
    if getattr(param, "is_flag", False):
        flag = getattr(value, "flag", None)
        if flag is None:
            raise BadConfig(f"{where} is {_shown(value)}; it must be true or false")
        return flag
    if not getattr(param, "multiple", False):
        return _text(value, where)
    items = value if isinstance(value, list) else [value]
    if not is_grouped:
        if not items:  # would pass for an option left out, whose default is another
            raise BadConfig(
                f"{where} is an empty list; at least one value is wanted",
                fix="leave it out for its default",
            )
        return [_text(item, where) for item in items]
    groups = items if items and all(isinstance(item, list) for item in items) else [items]
    return [json.dumps([_text(word, where) for word in group]) for group in groups]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadConfig(f"{where} is {_shown(value)}; one value is wanted", fix="put it in quotes")
    return str(value)


def _shown(value: Any) -> str:
    return "nothing" if value is None else shown(value)
