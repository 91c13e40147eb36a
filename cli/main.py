"""The `llmctl` program: exit codes, signals, and the one place that catches everything.

`cli/app.py` is the table of commands. Their modules keep heavy imports inside functions, so
`--help` costs no more than typer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from llmctl.cli import config_file, signals
from llmctl.cli.app import command_path, make_context
from llmctl.cli.endings import (
    EXIT_INTERRUPT,
    EXIT_PIPE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    report,
    report_unnamed,
    report_usage,
)
from llmctl.cli.streams import has_results, open_streams, silence_stdout
from llmctl.errors import BadConfig, LlmctlError
from llmctl.publish import remove_unfinished

# The base of typer's usage errors, wherever this version of typer keeps it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of the `llmctl` program."""
    open_streams()
    sys.unraisablehook = signals.resend_signal
    signals.install_handlers()
    code = _run(sys.argv[1:])
    signals.ignore_all()
    remove_unfinished()
    try:
        sys.stdout.flush()
    except OSError:  # any problem with it has been reported
        silence_stdout()
    sys.exit(code)


def execute(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code and never raises."""
    previous = signals.install_handlers()
    try:
        return _run(argv)
    finally:
        signals.put_back(previous)


def _run(argv: Sequence[str]) -> int:
    """Run the command line; every way to end becomes its message and exit code."""
    argv = list(argv) or ["--help"]
    is_json = "--json" in argv or config_file.asks_for_json(argv)
    try:
        code = _invoke(argv)
        sys.stdout.flush()  # a full disk or a closed reader is detected here at the latest
        return code
    except LlmctlError as error:
        fix = error.fix
        if not fix and error.exit_code == EXIT_USAGE:
            fix = f"see: {command_path(argv)} --help"
        is_json = is_json and not has_results(error)
        return report(error.name, str(error), fix, error.exit_code, is_json)
    except UsageError as error:
        return report_usage(error, argv, is_json)
    except typer.Abort:
        return EXIT_INTERRUPT
    except signals.Terminated:
        print("llmctl: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("llmctl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:  # the reader of our results has closed the pipe
        silence_stdout()
        return EXIT_PIPE
    except Exception as error:
        if (number := signals.last_raised()) is not None:
            # Native code swallows exceptions during its imports; an import it left unfinished
            # failed later.
            print("llmctl: interrupted", file=sys.stderr)
            return 128 + number
        return report_unnamed(error, is_json and not has_results(error))


def _invoke(argv: list[str]) -> int:
    """Parse and run, without typer's own error printing."""
    try:
        os.getcwd()
    except FileNotFoundError as error:  # libraries that PyTorch loads end the process over it
        raise BadConfig(
            "the current folder has been removed", fix="cd to a folder that exists"
        ) from error
    try:
        command, context = make_context(argv)
        with context:
            result = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
