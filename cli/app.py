"""The command table, and the parser made from it.

Only the module of the command in use is imported. Options are accepted with hyphens or
underscores: names are normalised by the option parser itself, values are never touched. Every
command also takes `--config FILE` (cli/config_file.py) and `--help-all` (cli/help.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from llmctl.cli import config_file, help
from llmctl.cli.signatures import give_parameters, refuse_empty_paths

# command: (module, function or typer.Typer with sub-commands, line in `llmctl --help`)
COMMANDS = {
    "quantize": (
        "llmctl.cli.quantize",
        "quantize",
        "Hugging Face checkpoint -> quantized checkpoint.",
    ),
    "build": ("llmctl.cli.build.command", "build", "Checkpoint -> engine directory."),
    "run": ("llmctl.cli.run.command", "run", "Text in, text out, with or without a draft engine."),
    "bench": (
        "llmctl.cli.bench.command",
        "bench",
        "Latency and throughput of an engine, and what its draft changes.",
    ),
    "dataset": (
        "llmctl.cli.dataset.command",
        "dataset",
        "Requests for `bench`: random tokens or text, a JSON object a line.",
    ),
    "inspect": (
        "llmctl.cli.inspect.command",
        "inspect",
        "What an engine or a checkpoint holds, and what a step of it costs.",
    ),
    "doctor": (
        "llmctl.cli.doctor.command",
        "doctor",
        "This machine, and which backends work on it.",
    ),
    "completion": (
        "llmctl.cli.completion",
        "completion",
        "Completion of commands and options for a shell.",
    ),
}
EXAMPLES = "\n".join(
    f"  llmctl {line}"
    for line in (
        "quantize --model-dir examples/demo-target --calib-size 32 --output-dir out/fp8",
        "build --checkpoint-dir out/fp8 --output-dir out/engine",
        "run --engine-dir out/engine --max-output-len 32 --input-text 'def read_lines(path):'",
    )
)


def make_context(argv: list[str]) -> tuple[Any, Any]:
    """The command of a command line, and its context, parsed. Raises typer's usage errors."""
    selected = next((word for word in argv if not word.startswith("-")), None)
    if selected is not None and selected in COMMANDS:
        prepare = getattr(_module(selected), "prepare_argv", None)
        if prepare is not None:
            start = argv.index(selected) + 1
            argv = argv[:start] + prepare(argv[start:])
    command = make_command([selected] if selected is not None else [])
    return command, command.make_context("llmctl", [*argv])  # which takes words out of it


def command_path(argv: list[str]) -> str:
    """The command of a command line as typed: "llmctl bench latency"."""
    name = next((word for word in argv if not word.startswith("-")), None)
    if name not in COMMANDS:
        return "llmctl"
    command = make_command([name]).commands[name]
    inner = getattr(command, "commands", {})
    takes_value = {
        option
        for each in command.params
        if not getattr(each, "is_flag", True)
        for option in each.opts
    }
    words = iter(argv[argv.index(name) + 1 :])
    for word in words:
        if word.replace("_", "-") in takes_value:
            next(words, None)  # which may be spelled like a sub-command
        elif not word.startswith("-"):
            return f"llmctl {name} {word}" if word in inner else f"llmctl {name}"
    return f"llmctl {name}"


def find_command(path: str) -> Any:
    """The command of a path, as `command_path` has it."""
    _, *names = path.split()
    command = make_command(names[:1])
    for name in names:
        command = command.commands[name]
    return command


def make_command(imported: Collection[str]) -> Any:
    """The tree of commands; commands not in `imported` consist only of their name."""
    app = _new_app()
    app.callback(invoke_without_command=True)(_global_options)
    for name, (_, attribute, summary) in COMMANDS.items():
        if name not in imported:
            app.command(name, short_help=summary)(_listed_only)
            continue
        module = _module(name)
        found = getattr(module, attribute)
        if isinstance(found, typer.Typer):
            callbacks = [found.registered_callback, *found.registered_commands]
            for registered in callbacks:
                if registered is not None and registered.callback is not None:
                    registered.callback = _with_common_options(registered.callback, module)
            app.add_typer(found, name=name, short_help=summary)
        else:
            app.command(name, short_help=summary)(_with_common_options(found, module))
    command: Any = typer.main.get_command(app)
    _set_help(command)
    return command


def _new_app() -> typer.Typer:
    return typer.Typer(
        name="llmctl",
        help="Build FP8 engines from Hugging Face checkpoints; run exact speculative decoding."
        f"\n\nExamples:\n{EXAMPLES}",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: no option name is cut off, and no rich is imported
        context_settings={
            "token_normalize_func": lambda name: name.replace("_", "-"),
            "help_option_names": ["-h", "--help"],
        },
    )


def _module(name: str) -> Any:
    return importlib.import_module(COMMANDS[name][0])


def _listed_only() -> None:
    raise AssertionError("a command that was not selected cannot run")


def _set_help(command: Any) -> None:
    """One layout for the help of all commands."""
    command.get_help = partial(help.render, command)
    for child in getattr(command, "commands", {}).values():
        _set_help(child)


def _with_common_options(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The function with `--config` and `--help-all` added to its own options, for the parser."""
    if getattr(function, "has_common_options", False):  # a sub-command of an earlier parse
        return function
    signature = inspect.signature(function, eval_str=True)

    def load(context: typer.Context, path: Path | None) -> None:
        if path is not None:
            grouped = getattr(module, "GROUPED_LISTS", ())
            above = None if context.parent is None else context.parent.command
            found = config_file.read_config(path, context.command, grouped, above)
            context.default_map = found

    common = {
        "config": Annotated[
            Path | None,
            typer.Option(
                "--config",
                help="YAML file of these options; the command line overrides it.",
                is_eager=True,
                expose_value=False,
                callback=load,
            ),
        ],
        "help_all": Annotated[
            bool,
            typer.Option(
                "--help-all",
                help="Show rarely used options too, and exit.",
                is_eager=True,
                expose_value=False,
                callback=help.show_all,
            ),
        ],
    }
    defaults = {"config": None, "help_all": False}
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation
        )
        for name, annotation in common.items()
    ]
    parameters = [*signature.parameters.values(), *added]

    def command(**values: Any) -> Any:
        return function(**{n: v for n, v in values.items() if n not in common})

    refuse_empty_paths(parameters)
    give_parameters(command, function, signature, parameters)
    vars(command)["has_common_options"] = True  # a mark for later parses
    return command


def _global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(f"llmctl {installed_version('llmctl')}")
        raise typer.Exit()
