"""The `llmctl` program: exit codes, signals, and the one place that catches everything.

`cli/app.py` is the table of commands. Their modules keep heavy imports inside functions, so
`--help` costs no more than typer.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import typer

from llmctl.cli import config_file
from llmctl.cli.app import command_path, make_context
from llmctl.cli.machine_failures import name_failure
from llmctl.cli.streams import has_results, open_streams, silence_stdout
from llmctl.errors import BadConfig, LlmctlError, Unsupported

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPT = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_PIPE = 128 + signal.SIGPIPE

Handler = Callable[[int, FrameType | None], object] | int | None

# The base of typer's usage errors, wherever this version of typer keeps it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Interrupted(KeyboardInterrupt):
    """SIGINT. A class of its own: when plain KeyboardInterrupt passes through exec(), as it does
    in an import that makes dataclasses, CPython kills itself at exit whatever exit code is set."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread so that every clean-up runs as it does for Ctrl-C."""


_SIGNALS: dict[signal.Signals, type[KeyboardInterrupt]] = {
    signal.SIGINT: Interrupted,
    signal.SIGTERM: Terminated,
}
REPEAT_S = 1.0  # a signal this soon after another one counts as the same


def main() -> None:
    """Entry point of the `llmctl` program."""
    open_streams()
    sys.unraisablehook = _resend_signal
    _install_handlers()
    code = _run(sys.argv[1:])
    for number in _SIGNALS:  # everything is done: a late signal has no effect
        signal.signal(number, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError:  # any problem with it has been reported
        silence_stdout()
    sys.exit(code)


def execute(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code and never raises."""
    previous = _install_handlers()
    try:
        return _run(argv)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
        return _report(error.name, str(error), fix, error.exit_code, is_json)
    except UsageError as error:
        return _report_usage(error, argv, is_json)
    except typer.Abort:
        return EXIT_INTERRUPT
    except Terminated:
        print("llmctl: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("llmctl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:  # the reader of our results has closed the pipe
        silence_stdout()
        return EXIT_PIPE
    except Exception as error:
        stop = signal.getsignal(signal.SIGTERM)
        if isinstance(stop, _Stop) and stop.number is not None:
            # Native code swallows exceptions during its imports; an import it left unfinished
            # failed later.
            print("llmctl: interrupted", file=sys.stderr)
            return 128 + stop.number
        return _report_unnamed(error, is_json and not has_results(error))


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


# ---- endings ----


def _report(name: str, message: str, fix: str, code: int, is_json: bool) -> int:
    if is_json:
        error = {"name": name, "message": message, "fix": fix, "exit_code": code}
        try:
            print(json.dumps({"error": error}, ensure_ascii=False), flush=True)
            return code
        except BrokenPipeError:
            silence_stdout()
            return EXIT_PIPE
        except OSError:  # a full disk, perhaps the very error to report: stderr remains
            silence_stdout()
    print(f"error[{name}]: {message}", file=sys.stderr)
    if fix:
        print(f"fix: {fix}", file=sys.stderr)
    return code


def _report_usage(error: Exception, argv: list[str], is_json: bool) -> int:
    """An option that cannot be parsed; known ones of other tools get their reason."""
    from llmctl.cli.refused import OTHER_COMMANDS, refusal
    from llmctl.cli.usage import explain

    option = getattr(error, "option_name", None)
    command = next((word for word in argv if not word.startswith("-")), "")
    if option is not None:
        reason = refusal(option, command)
        if reason is not None:
            name, fix = Unsupported.__name__, f"leave {option} out"
            return _report(name, f"{option} is not available: {reason}", fix, EXIT_USAGE, is_json)
    describe: Callable[[], str] = getattr(error, "format_message", lambda: str(error))
    context: Any = getattr(error, "ctx", None)
    path = getattr(context, "command_path", command_path(argv))
    message, param = _with_found(describe(), error), getattr(error, "param", None)
    message = " ".join(message.split())  # choices are a line each
    if type(error).__name__ == "NoArgsIsHelpError" or message == "Missing command.":
        message = f"a command is missing: {' or '.join(context.command.commands)}"
    if (found := explain(message, argv)) is not None:
        return _report("Usage", *found, EXIT_USAGE, is_json)
    typed = {word.partition("=")[0].replace("_", "-") for word in argv}
    of_file = getattr(context, "default_map", None) or {}
    if param is not None and param.name in of_file and not typed.intersection(param.opts):
        message += f" (in {config_file.given_path(argv)})"
    missing = re.fullmatch(r"No such command '(.*)'\.", message)
    other = OTHER_COMMANDS.get((path, missing[1])) if missing is not None else None
    return _report("Usage", message, other or f"see: {path} --help", EXIT_USAGE, is_json)


def _with_found(message: str, error: Exception) -> str:
    """The message with the value that was refused, where typer took it from pydantic: that says
    only what is wanted."""
    list_errors = getattr(error.__cause__, "errors", None)
    refused = list_errors() if list_errors is not None else ()
    found = repr(refused[0]["input"])[:100] if refused else ""
    message = message.replace("Value error, ", "")
    return message if found in message else f"{message}; found {found}"


def _report_unnamed(error: Exception, is_json: bool) -> int:
    """Exceptions of Python and of other libraries: a failure of the machine, or a bug."""
    if (failure := name_failure(error)) is not None:
        return _report(*failure, is_json)
    path = _keep_traceback(error)
    message = f"{type(error).__name__}: {error} (this is a bug in llmctl; traceback in {path})"
    return _report("Bug", message, f"report it with the contents of {path}", EXIT_BUG, is_json)


def _keep_traceback(error: Exception) -> str:
    """Where the traceback is: a file, or stderr where none can be written."""
    lines = [f"llmctl {' '.join(sys.argv[1:])}\n\n", *traceback.format_exception(error)]
    try:
        handle, path = tempfile.mkstemp(prefix="llmctl-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
    except OSError:
        print(*lines, sep="", file=sys.stderr)
        return "stderr"
    return path


def _install_handlers() -> dict[signal.Signals, Handler]:
    """Turn SIGINT and SIGTERM into exceptions of the main thread; returns what they replace.

    An ignored signal (a background job of a script) stays ignored.
    """
    previous: dict[signal.Signals, Handler] = {}
    if threading.current_thread() is not threading.main_thread():
        return previous
    stop = _Stop()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, stop)
    return previous


class _Stop:
    """The handler of every signal that ends the program.

    A second signal soon after the first is ignored: it would cut the first one's clean-up short.
    """

    def __init__(self) -> None:
        self._last_s = -math.inf
        self.number: int | None = None  # of the last signal raised

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= REPEAT_S:
            self._last_s = now_s
            self.number = number
            raise _SIGNALS[signal.Signals(number)]


def _resend_signal(unraisable: sys.UnraisableHookArgs) -> None:
    """Python prints and drops exceptions raised in a destructor or a weakref callback, such as
    those of the import system. A signal whose exception was dropped there is sent again
    afterwards."""
    for number, kind in _SIGNALS.items():
        if unraisable.exc_type is kind:
            again = threading.Timer(REPEAT_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
