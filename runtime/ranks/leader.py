"""Rank 0 of a run: it starts the other ranks or awaits those that a launcher started, gives them
commands, and finds out which is lost and why."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import Empty, Queue
from typing import Any, TypeVar

from llmctl.errors import BadConfig, RankFailure
from llmctl.plugins.backends.cpu.ranks import Ranks, make_segment
from llmctl.runtime.ranks.channel import Channel, listen
from llmctl.runtime.ranks.commands import Command, encode
from llmctl.runtime.ranks.identity import difference, identity
from llmctl.runtime.ranks.launch import World, address_of
from llmctl.runtime.ranks.processes import END_S, Followers, RankOptions, ending_of, start_rank

Result = TypeVar("Result")

_POLL_S = 0.1
_START_S = 60.0  # that a process which rank 0 started has at least to come and to open engines


class Leader:
    """Rank 0's side of all other ranks. Raises RankFailure where they do not come, or are others,
    and BadConfig in a process that is one of them.

    `failure` is what ended the run; every command after it raises it.
    """

    def __init__(
        self, options: RankOptions, world: World | None, said: Mapping[str, Any] | None = None
    ) -> None:
        """said: what all other ranks hear of this one; what they say of themselves is in `said`."""
        if world is not None and world.rank != 0:
            raise BadConfig(
                f"this process is rank {world.rank} of the {world.size} that {world.launcher} "
                "started; rank 0 alone opens engines",
                fix="call serve_rank(options) before, as llmctl.open does",
            )
        self.options = options
        self.said: dict[int, Mapping[str, Any]] = {0: dict(said or {})}
        self.failure: RankFailure | None = None
        self._is_leading = False
        self.on_loss: Callable[[], None] = lambda: None  # ends what waits for a rank besides
        self._followers = Followers()
        self._end = weakref.finalize(self, self._followers.end)
        self._done: Queue[int] = Queue()  # ranks that have done what may fail
        self._lock = threading.Lock()
        try:
            self.ranks = self._meet(world)
        except BaseException:
            self._end()
            raise
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
        watch.start()

    @property
    def _start_limit_s(self) -> float:
        """A process that was started here may first have to import; that it ends is noticed at
        once."""
        return max(self.options.limit_s, _START_S * bool(self._followers.processes))

    # ---- before the run ----

    def _meet(self, world: World | None) -> Ranks:
        options = self.options
        own = identity(0, options.size, options.folders)
        job = world.job if world is not None else secrets.token_hex(16)
        with listen(address_of(job), job, options.size) as listener:
            if world is None:
                for rank in range(1, options.size):
                    self._followers.processes[rank] = start_rank(rank, job, options)
            self._admit(listener, own)
        segment = make_segment(options.size)
        try:
            said = [self.said[rank] for rank in range(options.size)]
            for channel in self._followers.channels.values():
                channel.send({"welcome": _wishes(options), "said": said}, segment)
            return Ranks(0, options.size, segment, options.limit_s)
        finally:
            os.close(segment)

    def _admit(self, listener: socket.socket, own: Mapping[str, Any]) -> None:
        """Accept every rank, once each."""
        channels, size = self._followers.channels, self.options.size
        end = time.monotonic() + self._start_limit_s
        while len(channels) < size - 1:
            self._require_alive()
            if time.monotonic() > end:
                missing = [rank for rank in range(1, size) if rank not in channels]
                raise RankFailure(
                    f"rank {missing[0]} has not come within {self._start_limit_s:g} s; "
                    f"{len(channels) + 1} of {size} ranks are here",
                    fix=f"start {size} processes on one machine (mpirun -n {size}), or raise "
                    "--rank-timeout",
                )
            listener.settimeout(_POLL_S)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            self._introduce(Channel(connection), own)

    def _introduce(self, channel: Channel, own: Mapping[str, Any]) -> None:
        if channel.peer[1] != os.getuid():  # somebody else's: not of this run
            channel.close()
            return
        try:
            said = channel.receive(self.options.limit_s)
        except (TimeoutError, ValueError):
            said = None
        rank = said.get("rank") if said is not None else None
        if said is None or type(rank) is not int or not 0 < rank < 1024:
            channel.close()  # it has ended, or is none of ours: the one that is missing is named
            return
        try:
            self._require_one_of_us(rank, said, own)
        except RankFailure as error:
            channel.send({"refused": str(error)})
            channel.close()
            raise
        self._followers.channels[rank] = channel
        self.said[rank] = said

    def _require_one_of_us(
        self, rank: int, said: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        name = f"rank {rank} (process {said.get('pid')})"
        if "error" in said:
            raise RankFailure(f"{name} failed: {_told(said)}", fix=str(said["error"].get("fix")))
        found = difference(own, said)
        if found is None and rank in self._followers.channels:
            found = f"comes a second time, after process {self._followers.pid(rank)}"
        if found is None and rank >= self.options.size:
            found = f"is one too many; the engine has {self.options.size} ranks"
        if found is not None:
            raise RankFailure(f"{name} {found}", fix="start all ranks with one command line")

    def _require_alive(self) -> None:
        for rank, process in self._followers.processes.items():
            if process.poll() is not None and rank not in self._followers.channels:
                raise RankFailure(f"rank {rank} {ending_of(process)} before it was ready")

    # ---- during the run ----

    def command(self, command: Command) -> None:
        """Let every other rank make a call, in this order. Raises RankFailure."""
        self.require_running()
        try:
            self.ranks.write(encode(command))
        except RankFailure as error:
            raise self.explain(error) from error

    def lead(self, command: Command, call: Callable[[], Result]) -> Result:
        """Make a call here that every other rank makes, too. Calls within it are each rank's own:
        they are not handed on. Raises RankFailure, and what the call raises, which ends the run."""
        if self._is_leading:
            return call()
        self.command(command)
        self._is_leading = True
        try:
            return call()
        except RankFailure as error:
            raise self.explain(error) from error
        except Exception as error:  # any error here leaves the others waiting: it ends the run
            self.fail(RankFailure(f"rank 0 failed: {type(error).__name__}: {error}"))
            self.ranks.lose(0)
            raise
        finally:
            self._is_leading = False

    def wait_for_all(self, what: str, *, is_starting: bool = False) -> None:
        """Wait until every rank has done what it was last told, which may fail; each says so.
        what: it has not done, in an error."""
        limit_s = self._start_limit_s if is_starting else self.options.limit_s
        end = time.monotonic() + limit_s
        missing = set(range(1, self.options.size))
        while missing:
            self.require_running()
            with contextlib.suppress(Empty):
                missing.discard(self._done.get(timeout=_POLL_S))
            if missing and time.monotonic() > end:
                raise self.fail(self._late(min(missing), what, limit_s))

    def require_running(self) -> None:
        """Raise what ended the run, if something did."""
        if self.failure is not None:
            raise self.failure

    def explain(self, error: RankFailure) -> RankFailure:
        """What ended the run, where a meeting says only that a rank is late or has ended."""
        if str(error).endswith("is late"):
            rank = int(str(error).split()[1])
            return self.fail(self._late(rank, "come", self.options.limit_s))
        end = time.monotonic() + END_S
        while self.failure is None and time.monotonic() < end:  # the watch is finding out
            time.sleep(0.01)
        return self.failure or self.fail(error)

    def _late(self, rank: int, what: str, waited_s: float) -> RankFailure:
        return RankFailure(
            f"rank {rank} (process {self._followers.pid(rank)}) has not {what} for "
            f"{waited_s:g} s: it hangs, or was stopped",
            fix="see what that process waits for; --rank-timeout gives it more time",
        )

    def fail(self, error: RankFailure) -> RankFailure:
        """Note what ended the run; the first that is noted stays."""
        with self._lock:
            self.failure = self.failure or error
        return self.failure

    def lose(self, rank: int, said: Mapping[str, Any] | None) -> None:
        """A rank's channel has closed, or it says that it failed."""
        name = f"rank {rank} (process {self._followers.pid(rank)})"
        if said is not None:
            self.fail(RankFailure(f"{name} failed: {_told(said)}", fix=str(said["error"]["fix"])))
        elif rank in self._followers.processes:
            process = self._followers.processes[rank]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            self.fail(RankFailure(f"{name} {ending_of(process)}", fix="run again; see its output"))
        else:
            self.fail(RankFailure(f"{name} has ended", fix="see its output, or the launcher's"))
        self.ranks.lose(rank)
        self.on_loss()

    def close(self) -> None:
        """End the other ranks. Happens anyway when nobody has the leader any more, and at exit."""
        self._end()


def _watch(reference: weakref.ref[Leader]) -> None:
    """Listens to every rank until one is lost or the run ends."""
    leader = reference()
    if leader is None:
        return
    channels = dict(leader._followers.channels)
    del leader  # it ends when nobody else needs it
    with selectors.PollSelector() as selector:  # `select` knows no descriptor beyond 1023
        for rank, channel in channels.items():
            if channel.connection.fileno() < 0:  # closed meanwhile: the run has ended
                return
            selector.register(channel.connection, selectors.EVENT_READ, rank)
        while True:
            ready = selector.select(_POLL_S)
            leader = reference()
            if leader is None or not leader._end.alive:
                return
            for key, _ in ready:
                if not _hear(leader, key.data, channels[key.data]):
                    return
            del leader


def _hear(leader: Leader, rank: int, channel: Channel) -> bool:
    """Take in what a rank says; False once it is lost."""
    while True:
        said: dict[str, Any] | None = {}
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            said = channel.receive(1)
        if said is None or "error" in said:
            if leader._end.alive:
                leader.lose(rank, said)
            return False
        if "done" in said:
            leader._done.put(rank)
        if not channel.has_message:
            return True


def _wishes(options: RankOptions) -> dict[str, Any]:
    return {
        "windows": asdict(options.windows),
        "num_threads": options.num_threads,
        "engines": list(options.folders),
    }


def _told(said: Mapping[str, Any]) -> str:
    return f"{said['error']['name']}: {said['error']['message']}"
