"""The help of every command: one screen, everything to be found, examples that parse."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from llmctl.cli.app import COMMANDS, make_command, make_context

SCREEN_LINES, SCREEN_COLUMNS = 50, 100


def _paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _paths(child, (*path, name))


PATHS = list(_paths(make_command(COMMANDS)))
NAMES = [" ".join(path) or "llmctl" for path in PATHS]


def _command(path: tuple[str, ...]) -> Any:
    command: Any = make_command(COMMANDS)
    for name in path:
        command = command.commands[name]
    return command


def examples(text: str) -> list[str]:
    """The command lines under "Examples:", continued ones as one."""
    shown = text.partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in shown.replace("\\\n", " ").splitlines() if line.strip()]


def _options(text: str) -> set[str]:
    above = text.partition("Examples:\n")[0]
    return set(re.findall(r"^ +(--[a-z0-9-]+|-h, --help)", above, re.M))


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_help_fits_one_screen(llmctl, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))  # whatever terminal the tests run in
    lines = llmctl(*path, "--help").out.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS


@pytest.mark.parametrize("columns", ["1", "20", "0", "-5", "many", "100000"])
def test_help_has_a_width_for_any_terminal(llmctl, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    done = llmctl("bench", "--help-all")
    assert done.code == 0 and "throughput" in done.out
    assert max(map(len, done.out.partition("Examples:")[0].splitlines())) <= 100


@pytest.mark.parametrize("path", [path for path in PATHS if path], ids=NAMES[1:])
def test_help_all_shows_every_option_and_help_says_how_many_more(llmctl, path):
    short = llmctl(*path, "--help")
    command = _command(path)
    if hasattr(command, "commands") and not _options(short.out) - {"-h, --help"}:
        return  # a group without options of its own
    whole = llmctl(*path, "--help-all")
    assert whole.code == 0 and whole.err == "" and "x<=" not in whole.out
    named = [p for p in command.params if p.param_type_name == "option"]
    assert len(_options(whole.out)) == len(named) + 1  # and --help itself
    assert _options(short.out) <= _options(whole.out)
    missing = len(_options(whole.out)) - len(_options(short.out))
    more = re.search(r"^(\d+) more options: llmctl [a-z -]+ --help-all$", short.out, re.M)
    assert (int(more[1]) if more else 0) == missing
    assert "list[" not in llmctl(*path, "--help-all").out, "a type of Python's as a value's name"


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_every_example_is_a_command_line_that_parses(llmctl, path):
    lines = examples(llmctl(*path, "--help").out)
    assert lines, "no example"
    for line in lines:
        words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"'))
        words = words[: words.index(">")] if ">" in words else words
        assert words[0] == "llmctl"
        command, context = make_context(words[1:])
        with context:
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
            while getattr(command, "commands", None):
                context = command.make_context(name, rest, parent=context)
                rest = [*context._protected_args, *context.args]
                name, command, rest = command.resolve_command(context, rest)
            assert command.make_context(name, rest, parent=context) is not None


def test_help_follows_a_narrow_terminal(llmctl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    above = llmctl("quantize", "--help").out.partition("Examples:\n")[0]
    assert max(map(len, above.splitlines())) <= 80


def test_every_option_that_a_fix_names_is_there(repository):
    """Of some command: a fix may be to build again."""
    known = {
        option
        for path in PATHS
        for each in _command(path).params
        for option in (*each.opts, *each.secondary_opts)
    }
    found = set()
    for folder in ("cli", "quantize", "builder", "runtime"):
        for path in (repository / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg in ("fix", "general_fix"):
                    said = ast.unparse(node.value)
                    found |= {(path.name, o) for o in re.findall(r"(?<!\w)--[a-z][\w-]*\w", said)}
    odd = {(n, o) for n, o in found if o.replace("_", "-") not in known | {"--upgrade"}}  # of pip
    assert len(found) > 50 and not odd
