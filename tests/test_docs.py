"""What the documentation names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmctl.cli.app import COMMANDS, make_command

_ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path.relative_to(_ROOT).as_posix()
    for path in (_ROOT / "README.md", *sorted(_ROOT.glob("docs/**/*.md")))
]
_FOLDERS = "cli|quantize|builder|runtime|plugins|tests|scripts|docs|examples"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./<>-]*)`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def named(text: str) -> list[str]:
    """Paths in backquotes; `<name>` stands for any folder or file."""
    return [re.sub(r"<\w+>", "*", path) for path in _PATH.findall(text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(repository: Path, page: str) -> None:
    text = (repository / page).read_text()
    missing = [path for path in named(text) if not list(repository.glob(path.rstrip("/")))]
    links = [
        link for link in _LINK.findall(text) if not ((repository / page).parent / link).exists()
    ]
    assert not missing and not links, (missing, links)


def scripts_run_as_files(text: str) -> list[str]:
    """Commands that name a Python script by its file: its imports need `python -m scripts.…`."""
    return re.findall(r"(?:`|python3? )(scripts/[\w/]+\.py\s[^`\n]+)", text)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_are_run_as_modules(repository: Path, page: str) -> None:
    assert not scripts_run_as_files((repository / page).read_text())


def test_a_script_run_as_a_file_is_seen() -> None:
    text = "`scripts/bench/cuda.py`, `python -m scripts.bench.cuda --rows pair`, `scripts/x/y.py A`"
    assert scripts_run_as_files(text) == ["scripts/x/y.py A"]


def test_architecture_is_a_page(repository: Path) -> None:
    assert len((repository / "docs/architecture.md").read_text().splitlines()) <= 100


def test_a_path_that_is_not_there_is_seen(repository: Path) -> None:
    (path,) = named("see `runtime/<method>/nothing.py`")
    assert path == "runtime/*/nothing.py" and not list(repository.glob(path))


def commands(text: str) -> list[list[str]]:
    """The words of every `llmctl` command in a block of code or in backquotes."""
    blocks = re.findall(r"^( *)```\w*\n(.*?)^\1```", text, re.M | re.S)
    lines = [line for _, block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    lines += [" ".join(found.split()) for found in re.findall(r"`(llmctl [^`]+)`", prose)]
    found = []
    for line in lines:
        words = shlex.split(line.strip(), comments=True)
        if words[:1] == ["llmctl"] and words[1:2] != ["COMMAND"]:
            ends = [words.index(word) for word in ("|", ">", "&&", "->", "2>&1") if word in words]
            found.append(words[: min(ends, default=len(words))])
    return found


def options_unknown(words: list[str]) -> list[str]:
    """Options of a command line that its command does not have, or the command itself."""
    command: Any = make_command(COMMANDS)
    rest = words[1:]
    names = {"--help"}
    while command is not None:
        names |= {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
        children = getattr(command, "commands", None)
        if children is None:
            break
        at = next((i for i, word in enumerate(rest) if word in children), None)
        if at is None:
            return rest[:1]
        command = command.get_command(None, rest[at])
        rest = rest[:at] + rest[at + 1 :]
    asked = {word.split("=")[0] for word in rest if word.startswith("--") and word != "--"}
    return sorted(name for name in asked if name.replace("_", "-") not in names)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_parses(repository: Path, page: str) -> None:
    unknown = {
        " ".join(words): options_unknown(words)
        for words in commands((repository / page).read_text())
        if options_unknown(words)
    }
    assert not unknown


def test_an_option_that_is_not_there_is_seen() -> None:
    (words,) = commands("```\nllmctl run --engine_dir x --nothing 3\n```")
    assert options_unknown(words) == ["--nothing"]
    assert options_unknown(["llmctl", "fly"]) == ["fly"]
