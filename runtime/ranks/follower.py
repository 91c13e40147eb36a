"""Every rank but the first: opens its part of the engines and makes the calls that rank 0 makes.

A follower has no scheduler, requests or drafter, and prints nothing. It ends when rank 0 has gone,
and tells it what goes wrong here. Signals of a terminal are rank 0's.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from llmctl.builder.engine_format import read_engine_config
from llmctl.errors import LlmctlError, RankFailure
from llmctl.plugins.backends.cpu import set_num_threads
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.runtime.api import freezing
from llmctl.runtime.engines.opening import RankSide, opener_of
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.channel import Channel, connect
from llmctl.runtime.ranks.commands import decode
from llmctl.runtime.ranks.identity import identity
from llmctl.runtime.ranks.launch import OWN_LAUNCHER, World, address_of, find_world

ANSWERED = ("allocate_kv_cache", "allocate_host_blocks")  # calls that may fail on one rank alone
_LAST_WORDS_S = 10.0  # that rank 0 has to end the run after it was told what went wrong
_TERMINATED_S = 1.0  # that rank 0 has to end the run if all ranks were sent SIGTERM


def follow(world: World, folders: Mapping[str, Path], limit_s: float) -> int:
    """Be a rank until the run ends; its exit code, 0 unless this rank ended it.

    folders: of the engines, by role. limit_s: how long rank 0 has to come.
    """
    _leave_signals_to_rank_0()
    started_by = os.getppid()

    def is_orphan() -> bool:  # whoever started this process has gone; a launcher sees to it itself
        return world.launcher == OWN_LAUNCHER and os.getppid() != started_by

    side = _side(world, folders)  # before rank 0 waits: it may have to import, or a GPU
    channel = connect(address_of(world.job), limit_s, is_orphan)
    if channel is None:
        if not is_orphan():
            print(f"llmctl: rank {world.rank}: there is no rank 0 of this job", file=sys.stderr)
        return RankFailure.exit_code
    watch = _Watch(channel)
    try:
        if isinstance(side, Exception):
            raise side
        channel.send({**side.said, **identity(world.rank, world.size, folders)})
        welcome, ranks = _join(channel, world)
        watch.start()
        engines = _open(welcome, folders, ranks, side)
        channel.send({"done": "open"})
        _execute(channel, ranks, engines)
    except RankFailure:  # of another rank; rank 0 knows
        pass
    except Exception as error:  # any error here ends the run, and rank 0 reports it
        channel.send({"rank": world.rank, "pid": os.getpid(), **_told(error)})
    return watch.await_end()


def _side(world: World, folders: Mapping[str, Path]) -> RankSide | Exception:
    """What the engines' backend has in this process, or why it has nothing: rank 0 is told."""
    try:
        backend = read_engine_config(next(iter(folders.values()))).backend
        return opener_of(backend).rank_side(world.rank, world.size, folders)
    except Exception as error:
        return error


def refuse(world: World, error: LlmctlError, limit_s: float) -> int:
    """Tell rank 0 why this rank cannot take part; the exit code. Raises the error where there is
    no rank 0 to tell."""
    channel = connect(address_of(world.job), limit_s)
    if channel is None:
        raise error
    channel.send({"rank": world.rank, "pid": os.getpid(), **_told(error)})
    return _Watch(channel).await_end()


def _join(channel: Channel, world: World) -> tuple[Mapping[str, Any], Ranks]:
    """What rank 0 wishes and what all ranks have said, and what all share. Raises RankFailure if it
    wants another rank."""
    message, files = channel.receive_file()
    if message is None or "welcome" not in message or len(files) != 1:
        raise RankFailure("rank 0 has refused this rank, and says why")
    ranks = Ranks(world.rank, world.size, files[0], 0)
    os.close(files[0])
    return message, ranks


def _open(
    welcome: Mapping[str, Any], folders: Mapping[str, Path], ranks: Ranks, side: RankSide
) -> Mapping[str, Any]:
    wishes = welcome["welcome"]
    set_num_threads(wishes["num_threads"])
    given = wishes["windows"]
    windows = WindowOptions(tuple(given["sizes"]), given["sink_tokens"])
    wanted = {role: folders[role] for role in wishes["engines"]}
    return side.open(wanted, windows, ranks, welcome["said"])


def _execute(channel: Channel, ranks: Ranks, engines: Mapping[str, Any]) -> NoReturn:
    freezing.freeze()  # as rank 0 does: it would wait for a full garbage collection here
    while True:
        command = decode(ranks.read)
        command.make(engines)
        if command.call in ANSWERED:
            channel.send({"done": command.call})


class _Watch:
    """Ends this process when rank 0 has gone, whatever this rank waits for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._code = 0

    def start(self) -> None:
        """From here on nothing else receives from the channel."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def await_end(self) -> int:
        """The exit code, once rank 0 has ended the run. To end first would let a launcher end
        everything before rank 0 has said why."""
        self._code = RankFailure.exit_code
        if self._thread is None:
            self.start()
        time.sleep(_LAST_WORDS_S)
        return self._code

    def _run(self) -> None:
        try:
            while self._channel.receive() is not None:
                pass
        except (OSError, ValueError):
            pass
        os._exit(self._code)


def _told(error: Exception) -> dict[str, Any]:
    name = error.name if isinstance(error, LlmctlError) else type(error).__name__
    fix = error.fix if isinstance(error, LlmctlError) else ""
    return {"error": {"name": name, "message": str(error), "fix": fix}}


def _leave_signals_to_rank_0() -> None:
    """Ctrl-C means nothing here, nor does a terminal that has gone. SIGTERM ends this process, but
    after rank 0, which may have had it too and has the last word."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Any thread may get the signal, and the main thread may be in the middle of a step: Python's
    # handler writes a byte, for a thread that has nothing else to do.
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    threading.Thread(target=_terminate, args=(woken, wakes), daemon=True).start()


def _terminate(woken: socket.socket, wakes: socket.socket) -> None:
    """After a signal. Keeps both ends open until then."""
    woken.recv(1)
    time.sleep(_TERMINATED_S)
    os._exit(128 + signal.SIGTERM)


def main() -> int:
    """`python -m llmctl.runtime.ranks.follower LIMIT_S ROLE=FOLDER...`, as rank 0 starts it."""
    limit_s, *folders = sys.argv[1:]
    world = find_world()
    assert world is not None, "rank 0 says which rank this is"
    pairs = (text.partition("=") for text in folders)
    return follow(world, {role: Path(folder) for role, _, folder in pairs}, float(limit_s))


if __name__ == "__main__":
    sys.exit(main())
