"""The program in processes that are forked from one that has imported what its commands need.

`python -m llmctl.cli.entry` takes two seconds of imports, and six for `quantize`; a fork begins
with them done. A fork has its own working folder, environment and arguments, and its stdin, stdout
and stderr are the caller's files. Tests of start-up, signals, memory, or settings that libraries
read when they are imported start the real program.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

# What a command imports while it runs; imported by the server at the first one of that name.
MODULES = {
    "bench": ("llmctl.cli.bench.session", "llmctl.cli.run.session", "llmctl.cli.bench.publish"),
    "build": ("llmctl.builder.build", "llmctl.builder.engine_format"),
    "quantize": ("llmctl.quantize.quantizer", "transformers.models.llama.modeling_llama"),
    "run": ("llmctl.cli.run.session", "llmctl.runtime.api.executor"),
    "follow": ("llmctl.runtime.ranks.follower", "llmctl.runtime.engines.open_cpu"),  # a rank
}
ALWAYS = ("llmctl.cli.main", "torch", "safetensors.torch", "tokenizers")


class ForkedProgram:
    """The server, started at the first use of `command`."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "socket"
        self._process: subprocess.Popen[str] | None = None

    @property
    def command(self) -> list[str]:
        """What comes before the program's arguments on a command line."""
        self._start()
        return [sys.executable, "-I", "-S", __file__, "call", str(self._address)]

    def request(self, wanted: Mapping[str, object]) -> socket.socket:
        """Where a fork for `wanted`, whose stdout is nowhere, says its process id and exit code, a
        line each."""
        self._start()
        server = socket.socket(socket.AF_UNIX)
        with open(os.devnull, "r+b", buffering=0) as nowhere:
            ask(server, str(self._address), wanted, (nowhere.fileno(), nowhere.fileno(), 2))
        return server

    def _start(self) -> None:
        if self._process is None:
            words = [sys.executable, __file__, "serve", str(self._address)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        """End the server; it keeps nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


# ---- in the client, which imports nothing but the above ----


def call(address: str, words: list[str]) -> int:
    """Have a command line run on this process's files; its exit code."""
    request = {"argv": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        ask(server, address, request, (0, 1, 2))
        _, _, code = server.makefile().read().partition("\n")
    assert code, "the program was killed"
    return int(code)


def ask(
    server: socket.socket, address: str, request: Mapping[str, object], files: tuple[int, int, int]
) -> None:
    """Connect, and ask for a fork with these for stdin, stdout and stderr."""
    server.connect(address)
    numbers = array.array("i", files).tobytes()
    server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
    server.sendall(json.dumps(dict(request)).encode())
    server.shutdown(socket.SHUT_WR)


# ---- in the server ----


def serve(address: str) -> None:
    """Fork for every call, until the process that started this one ends it or has ended."""
    from cores import share_cores

    del sys.path[0]  # this folder
    share_cores()
    for module in ALWAYS:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        reap()
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        request = json.loads(client.makefile().read())
        prepare(request["argv"])
        if os.fork() == 0:
            run(client, files, request)
        for file in files:
            os.close(file)
        client.close()


def reap() -> None:
    """Forget the forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def prepare(words: list[str]) -> None:
    """Import what the command imports."""
    name = words[0] if words else ""
    for module in MODULES.get(name, ()):
        importlib.import_module(module)
    if name == "quantize":
        from llmctl.quantize.layers import import_modelopt

        import_modelopt()


def run(client: socket.socket, files: list[int], request: dict[str, Any]) -> NoReturn:
    """One command line, to the end of this process."""
    code: object = 70
    client.sendall(f"{os.getpid()}\n".encode())
    is_rank, exit_now = request["argv"][:1] == ["follow"], os._exit

    def say_and_exit(code: object) -> NoReturn:
        client.sendall(str(code).encode())
        exit_now(0)

    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = ["llmctl", *request["argv"][is_rank:]]
        if is_rank:
            from llmctl.runtime.ranks.follower import main

            os.setpgid(0, 0)
            os._exit = say_and_exit  # as a rank ends whatever it waits for
        else:
            from llmctl.cli.entry import main

        try:
            code = main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        say_and_exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[2], sys.argv[3:]))
