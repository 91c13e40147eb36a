"""How a command ends: exit codes, and what is told of an error."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from llmctl.cli import config_file
from llmctl.cli.app import command_path
from llmctl.cli.machine_failures import name_failure
from llmctl.cli.streams import json_line, silence_stdout
from llmctl.cli.table import printable
from llmctl.errors import Unsupported

MOST_CHARS = 4_000  # of a message: a screen
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPT = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_PIPE = 128 + signal.SIGPIPE


def report(name: str, message: str, fix: str, code: int, is_json: bool) -> int:
    """Tell an error, as JSON on stdout or as text on stderr; returns the exit code: `code`, unless
    the reader of stdout has gone."""
    if len(message) > MOST_CHARS:  # of somebody's file, which is what is found wrong
        message = f"{message[:MOST_CHARS]} …"
    if is_json:
        error = {"name": name, "message": message, "fix": fix, "exit_code": code}
        try:
            print(json_line({"error": error}), flush=True)
            return code
        except BrokenPipeError:
            silence_stdout()
            return EXIT_PIPE
        except OSError:  # a full disk, perhaps the very error to report: stderr remains
            silence_stdout()
    for line in (f"error[{name}]: {message}", f"fix: {fix}" if fix else ""):
        if line:
            print("\n".join(map(printable, line.split("\n"))), file=sys.stderr)
    return code


def report_usage(error: Exception, argv: list[str], is_json: bool) -> int:
    """An option that cannot be parsed; known ones of other tools get their reason."""
    from llmctl.cli.refused import OTHER_COMMANDS, refusal
    from llmctl.cli.usage import explain

    option = getattr(error, "option_name", None)
    command = next((word for word in argv if not word.startswith("-")), "")
    if option is not None:
        reason = refusal(option, command)
        if reason is not None:
            name, fix = Unsupported.__name__, f"leave {option} out"
            return report(name, f"{option} is not available: {reason}", fix, EXIT_USAGE, is_json)
    describe: Callable[[], str] = getattr(error, "format_message", lambda: str(error))
    context: Any = getattr(error, "ctx", None)
    path = getattr(context, "command_path", command_path(argv))
    message, param = _with_found(describe(), error), getattr(error, "param", None)
    message = " ".join(message.split())  # choices are a line each
    if type(error).__name__ == "NoArgsIsHelpError" or message == "Missing command.":
        message = f"a command is missing: {' or '.join(context.command.commands)}"
    if (found := explain(message, argv)) is not None:
        return report("Usage", *found, EXIT_USAGE, is_json)
    typed = {word.partition("=")[0].replace("_", "-") for word in argv}
    of_file = getattr(context, "default_map", None) or {}
    if param is not None and param.name in of_file and not typed.intersection(param.opts):
        message += f" (in {config_file.given_path(argv)})"
    missing = re.fullmatch(r"No such command '(.*)'\.", message)
    other = OTHER_COMMANDS.get((path, missing[1])) if missing is not None else None
    return report("Usage", message, other or f"see: {path} --help", EXIT_USAGE, is_json)


def _with_found(message: str, error: Exception) -> str:
    """The message with the value that was refused, where typer took it from pydantic: that says
    only what is wanted."""
    list_errors = getattr(error.__cause__, "errors", None)
    refused = list_errors() if list_errors is not None else ()
    found = repr(refused[0]["input"])[:100] if refused else ""
    message = message.replace("Value error, ", "")
    return message if found in message else f"{message}; found {found}"


def report_unnamed(error: Exception, is_json: bool) -> int:
    """Exceptions of Python and of other libraries: a failure of the machine, or a bug."""
    if (failure := name_failure(error)) is not None:
        return report(*failure, is_json)
    path = _keep_traceback(error)
    message = f"{type(error).__name__}: {error} (this is a bug in llmctl; traceback in {path})"
    return report("Bug", message, f"report it with the contents of {path}", EXIT_BUG, is_json)


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
