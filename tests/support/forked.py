"""Command lines in forked processes: imports are paid once, and each can be stopped midway.

A moment is the N-th time that a process touches the file system below a folder, as Python's audit
events tell it: opening, making, renaming, removing. Data between two of them is not cut.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a server's modules are imported from elsewhere
    from support.forked_program import ForkedProgram

EVENTS = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "shutil.copyfile")
WAIT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """What a process left. code: its exit code, or minus the signal that ended it."""

    code: int
    out: str
    err: str
    num_moments: int


class ForkServer:
    """A process that has imported what a command does and forks for every command line."""

    def __init__(self, folder: Path, program: ForkedProgram, like: str) -> None:
        """like: the command whose imports it has."""
        self._folder = folder
        (questions, ask), (answers, answer) = os.pipe(), os.pipe()
        request = {"argv": ["serve"], "folder": str(folder), "environment": dict(os.environ)}
        server = program.request({**request, "like": like}, (questions, answer, 2))
        with server, server.makefile() as said:
            self._process = int(said.readline())
        os.close(questions)
        os.close(answer)
        self._questions, self._answers = os.fdopen(ask, "w"), os.fdopen(answers)

    def start(self, *argv: object, below: Path | None = None, **options: Any) -> int:
        """Start a command line; its process id. Moments are counted below `below`.

        kill_at: SIGKILL at this moment. hold: wait at the first os.rename until this file exists.
        has_space: let the file system say that it has a terabyte free. most_bytes: of one file.
        """
        words = [str(word) for word in argv]
        options = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
        request = {"argv": words, "below": str(below) if below else "", "folder": str(self._folder)}
        return int(self._ask(request | options))

    def wait(self, pid: int) -> Ended:
        """The end of a process."""
        code = int(self._ask({"wait": pid}))
        out, err, moments = (
            path.read_text() if (path := self._folder / f"{pid}.{name}").exists() else ""
            for name in ("out", "err", "moments")
        )
        return Ended(code, out, err, int(moments or -1))

    def run(self, *argv: object, below: Path | None = None, **options: Any) -> Ended:
        """Start, and wait."""
        return self.wait(self.start(*argv, below=below, **options))

    def warm(self, *argv: object) -> Ended:
        """Run a command line in the server itself: whatever it imports, every fork has then. Not
        for one that leaves threads behind, as running an engine does."""
        return self.wait(self.start(*argv, warm=True))

    def close(self) -> None:
        """End the server; it keeps nothing."""
        os.kill(self._process, signal.SIGKILL)
        self._questions.close()
        self._answers.close()

    def _ask(self, request: dict[str, Any]) -> str:
        print(json.dumps(request), file=self._questions, flush=True)
        return self._answers.readline()


# ---- in the server ----


def serve() -> None:
    codes: dict[int, int] = {}
    answers = os.fdopen(os.dup(1), "w")  # the commands' stdout is another
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = codes.pop(request["wait"], None)
            if answer is None:
                _, status = os.waitpid(request["wait"], 0)
                answer = os.waitstatus_to_exitcode(status)
        elif "warm" in request:
            answer = os.getpid()
            codes[answer] = run(request)
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(run(request))
        print(answer, file=answers, flush=True)


def run(request: dict[str, Any]) -> int:
    """One command line, in the process of its own or in the server; its exit code."""
    from llmctl.cli.main import execute

    name = f"{request['folder']}/{os.getpid()}"
    for number, suffix in ((1, "out"), (2, "err")):
        opened = os.open(f"{name}.{suffix}", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    if request.get("has_space"):
        import shutil

        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
    if "most_bytes" in request:
        most = request["most_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    moments = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal moments
        if event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        if not os.fspath(arguments[0]).startswith(request["below"] or "\0"):
            return
        moments += 1
        if moments == request.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "os.rename" and "hold" in request:
            hold(request.pop("hold"))

    if request["below"]:  # a hook stays for good
        sys.addaudithook(look)
    code = execute(request["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"{name}.moments").write_text(str(moments))
    return code


def hold(path: str) -> None:
    """Say that this process has come here, and wait for the file."""
    Path(f"{path}.{os.getpid()}").touch()
    until = time.monotonic() + WAIT_S
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.005)


if __name__ == "__main__":
    serve()
