"""The program in processes that are forked from one that has imported what its commands need.

`python -m llmctl.cli.entry` takes two seconds of imports, and six for `quantize`; a fork begins
with them done. A fork has its own working folder, environment and arguments, and its stdin, stdout
and stderr are the caller's files. Tests of start-up, signals, memory, or settings that libraries
read when they are imported start the real program.

There is one server for all test workers, as quantize's imports alone take ten seconds. It ends with
the last worker that has asked it for something.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# What a command imports while it runs; imported by the server at the first one of that name.
MODULES = {
    "bench": ("llmctl.cli.bench.session", "llmctl.cli.run.session", "llmctl.cli.bench.publish"),
    "build": ("llmctl.builder.build", "llmctl.builder.engine_format"),
    "quantize": ("llmctl.quantize.quantizer", "transformers.models.llama.modeling_llama"),
    "run": ("llmctl.cli.run.session", "llmctl.runtime.api.executor"),
    "follow": ("llmctl.runtime.ranks.follower", "llmctl.runtime.engines.open_cpu"),  # a rank
    "serve": (),  # another server, support/forked.py
}
FORKED = str(Path(__file__).with_name("forked.py"))
ALWAYS = ("llmctl.cli.main", "torch", "safetensors.torch", "tokenizers")


class ForkedProgram:
    """The server of a folder that all workers share, started at the first use of `command`."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "socket"
        self._held: socket.socket | None = None  # while there is one of these, the server is there

    @property
    def command(self) -> list[str]:
        """What comes before the program's arguments on a command line."""
        self._start()
        return [sys.executable, "-I", "-S", __file__, "call", str(self._address)]

    def request(
        self, wanted: Mapping[str, object], files: tuple[int, int, int] | None = None
    ) -> socket.socket:
        """Where a fork for `wanted` says its process id and exit code, a line each. files: for
        stdin, stdout and stderr; None: stdout is nowhere."""
        self._start()
        server = socket.socket(socket.AF_UNIX)
        with open(os.devnull, "r+b", buffering=0) as nowhere:
            ask(
                server, str(self._address), wanted, files or (nowhere.fileno(), nowhere.fileno(), 2)
            )
        return server

    def _start(self) -> None:
        if self._held is not None:
            return
        with open(self._address.with_name("lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while self._held is None:
                if not self._address.exists():
                    words = [sys.executable, __file__, "serve", str(self._address)]
                    pipe = subprocess.PIPE
                    started = subprocess.run(words, stdin=pipe, stdout=pipe, text=True)
                    assert started.stdout == "ready\n"
                self._held = self._hold()

    def _hold(self) -> socket.socket | None:
        """None: the server there was has ended meanwhile."""
        held = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            held.connect(str(self._address))
            held.sendall(b"h")
            if held.recv(1):
                return held
        held.close()
        return None

    def close(self) -> None:
        """End the server, if no other worker has it; it keeps nothing."""
        if self._held is not None:
            self._held.close()


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


def serve(address: str) -> NoReturn:
    """Fork for every call, in a process that this one leaves behind, until nobody holds it."""
    from cores import share_cores

    del sys.path[0]  # this folder
    gc.set_threshold(50_000)  # as in cli/entry.py
    share_cores()
    for module in ALWAYS:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if os.fork():
        print("ready", flush=True)
        os._exit(0)
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for number in (0, 1):  # whose reader waits for the end of the last copy
            os.dup2(nowhere.fileno(), number)
    held: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *held], [], [])[0]:
            if ready is not listener:
                held.remove(ready)
                ready.close()
            elif (client := listener.accept()[0]).recv(1, socket.MSG_PEEK) == b"h":
                client.sendall(client.recv(1))
                held.append(client)
            else:
                answer(client, [listener, *held])
        if not held:
            os.unlink(address)
            os._exit(0)


def answer(client: socket.socket, others: list[socket.socket]) -> None:
    """Fork for this client."""
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile().read())
    reap()
    prepare(request["argv"], request.get("like"))
    if os.fork() == 0:
        for other in others:
            other.close()
        run(client, files, request)
    for file in files:
        os.close(file)
    client.close()


def reap() -> None:
    """Forget the forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def prepare(words: list[str], like: str | None = None) -> None:
    """Import what the command imports, or the one named."""
    name = like or (words[0] if words else "")
    for module in MODULES.get(name, ()):
        importlib.import_module(module)
    if name == "quantize":
        from llmctl.quantize.layers import import_modelopt

        import_modelopt()


def run(client: socket.socket, files: list[int], request: dict[str, Any]) -> NoReturn:
    """One command line, to the end of this process."""
    code: object = 70
    client.sendall(f"{os.getpid()}\n".encode())
    kind, exit_now = request["argv"][:1], os._exit

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
        sys.argv = ["llmctl", *request["argv"][kind in (["follow"], ["serve"]) :]]
        if kind == ["follow"]:
            from llmctl.runtime.ranks.follower import main

            os.setpgid(0, 0)
            os._exit = say_and_exit  # as a rank ends whatever it waits for
        elif kind == ["serve"]:
            main = partial(runpy.run_path, FORKED, run_name="__main__")
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
