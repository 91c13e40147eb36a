"""`llmctl completion`: a script that completes commands, options and values in a shell.

The script contains all names and starts no program, so completion is instant; print it again after
an update. Options are offered with hyphens, even if underscores were typed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer


class Shell(enum.StrEnum):
    """Shells that there are scripts for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@dataclass(frozen=True, slots=True)
class Word:
    """An option of a command: its long name, first sentence of its help, and what it takes."""

    name: str
    summary: str
    is_flag: bool
    is_path: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A command: its words on the command line (() for llmctl itself), options, sub-commands."""

    path: tuple[str, ...]
    summary: str
    options: tuple[Word, ...]
    children: Mapping[str, str]  # name -> summary
    takes_path: bool  # has an argument


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print a completion script for a shell.

    To have it in every session: for bash, add the first line below to ~/.bashrc; for zsh, the
    second to ~/.zshrc, after compinit; for fish, run the third once.

    Examples:
      eval "$(llmctl completion bash)"
      eval "$(llmctl completion zsh)"
      llmctl completion fish > ~/.config/fish/completions/llmctl.fish
    """
    writers = {Shell.bash: _bash, Shell.zsh: _zsh, Shell.fish: _fish}
    typer.echo("\n".join(writers[shell](list(command_nodes()))))


def command_nodes() -> Iterator[Node]:
    """Every command and group, llmctl itself first."""
    from llmctl.cli.app import COMMANDS, make_command

    yield from _walk(make_command(COMMANDS), ())


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[Node]:
    children = getattr(command, "commands", {})
    context = typer.Context(command, info_name="llmctl")
    words = tuple(
        _word(param, context) for param in command.params if param.param_type_name == "option"
    )
    yield Node(
        path,
        command.get_short_help_str(60),
        (*words, Word("--help", "Show this message and exit", True, False, ())),
        {name: child.get_short_help_str(60) for name, child in children.items()},
        any(param.param_type_name == "argument" for param in command.params),
    )
    for name, child in children.items():
        yield from _walk(child, (*path, name))


def _word(param: Any, context: Any) -> Word:
    from llmctl.cli.help import record

    names, words = record(param, context)
    value = names.rpartition(" ")[2]
    choices = tuple(value.lower().split("|")) if "|" in value else ()
    long = next(option for option in param.opts if option.startswith("--"))
    summary = words.partition(". ")[0].partition(" (default")[0].rstrip(".")
    return Word(long, summary, bool(param.is_flag), value == "PATH", choices)


# ---- bash ----


def _bash(nodes: list[Node]) -> Iterator[str]:
    yield "_llmctl() {"
    yield "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}"
    yield "  local path='' word words=''"
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield '    case "$path $word" in'
    for node in nodes[1:]:
        yield f"      '{' '.join(('', *node.path))}') path='{' '.join(('', *node.path))}' ;;"
    yield "    esac"
    yield "  done"
    yield '  case "$path ${previous//_/-}" in'
    for node in nodes:
        prefix = " ".join(("", *node.path))
        for word in node.options:
            if word.choices:
                yield f"    '{prefix} {word.name}') words='{' '.join(word.choices)}' ;;"
            elif not word.is_flag:
                yield f"    '{prefix} {word.name}') COMPREPLY=(); return ;;"
    yield "  esac"
    yield '  if [ -z "$words" ]; then'
    yield '    case "$path" in'
    for node in nodes:
        offered = [*node.children, *(word.name for word in node.options)]
        yield f"      '{' '.join(('', *node.path)).rstrip()}') words='{' '.join(offered)}' ;;"
    yield "    esac"
    yield '    case "$current" in --*) current=${current//_/-} ;; esac'
    yield '    case "$path$current" in'
    for node in nodes:
        if not node.children:  # files, unless an option is begun
            yield f"      '{' '.join(('', *node.path))}'*)"
            yield '        case "$current" in -*) ;; *) COMPREPLY=(); return ;; esac ;;'
    yield "    esac"
    yield "  fi"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _llmctl llmctl"


# ---- zsh ----


def _zsh(nodes: list[Node]) -> Iterator[str]:
    yield "#compdef llmctl"
    for node in nodes:
        yield f"{_function(node)}() {{"
        specs = [_zsh_option(word) for word in node.options]
        if node.children:
            yield "  local -a commands=("
            for name, summary in node.children.items():
                yield f"    '{name}:{_plain(summary)}'"
            yield "  )"
            specs += ["'1:command:->command'", "'*::argument:->argument'"]
        elif node.takes_path:
            specs.append("'*:file:_files'")
        yield "  local state line"
        yield "  _arguments -C " + " \\\n    ".join(specs)
        if node.children:
            yield "  case $state in"
            yield "    command) _describe command commands ;;"
            yield "    argument) case $line[1] in"
            for name in node.children:
                child = "_".join(("_llmctl", *node.path, name)).replace("-", "_")
                yield f"      {name}) {child} ;;"
            yield "    esac ;;"
            yield "  esac"
        yield "}"
    yield "compdef _llmctl llmctl"


def _function(node: Node) -> str:
    return "_".join(("_llmctl", *node.path)).replace("-", "_")


def _zsh_option(word: Word) -> str:
    summary = _plain(word.summary).replace("[", "(").replace("]", ")").replace(":", "\\:")
    if word.is_flag:
        return f"'{word.name}[{summary}]'"
    values = f"({' '.join(word.choices)})" if word.choices else "_files" if word.is_path else ""
    return f"'{word.name}[{summary}]:value:{values}'"


# ---- fish ----


def _fish(nodes: list[Node]) -> Iterator[str]:
    yield "complete -c llmctl -f"
    for node in nodes:
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in node.path)
        if node.children:
            names = " ".join(node.children)
            none = f"not __fish_seen_subcommand_from {names}"
            where = f"{seen}; and {none}" if seen else none
            for name, summary in node.children.items():
                yield f"complete -c llmctl -n '{where}' -a {name} -d '{_plain(summary)}'"
        else:
            where = seen
            if node.takes_path:
                yield f"complete -c llmctl -n '{where}' -F"
        for word in node.options:
            parts = [f"complete -c llmctl -n '{where}' -l {word.name.removeprefix('--')}"]
            if word.choices:
                parts.append(f"-x -a '{' '.join(word.choices)}'")
            elif word.is_path:
                parts.append("-r -F")
            elif not word.is_flag:
                parts.append("-x")
            yield f"{' '.join(parts)} -d '{_plain(word.summary)}'"


def _plain(text: str) -> str:
    """Text that may stand between single quotes."""
    return text.replace("'", "’").replace("\\", "/")
