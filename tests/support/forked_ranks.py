"""Ranks that a test starts, forked from a process that has imported what they need: a process of
Python's takes a second of imports.

Tests of how ranks start and end start real ones: test_rank_launchers.py, test_rank_faults.py,
test_rank_launch.py, test_rank_meeting.py and test_launched.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from support.forked_program import ForkedProgram


class ForkedRank:
    """What is asked of the process of a rank, as `subprocess.Popen` has it."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self._code = server, None
        self.pid = int(self._read_line())

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self._code is None and select.select([self._server], [], [], 0)[0]:
            line = self._read_line()
            self._code = int(line) if line else -signal.SIGKILL
            self._server.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        if self._code is None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """At once, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read_line(self) -> str:
        """Up to the end of a line, or of the process."""
        read = b""
        while not read.endswith(b"\n") and (byte := self._server.recv(1)):
            read += byte
        return read.decode()


def fork_ranks(program: ForkedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `start_rank` of this process forks one."""

    def popen(command: Sequence[str], env: Mapping[str, str], **_: object) -> ForkedRank:
        at = command.index("llmctl.runtime.ranks.follower")
        request = {
            "argv": ["follow", *command[at + 1 :]],
            "folder": os.getcwd(),
            "environment": env,
        }
        return ForkedRank(program.request(request))

    replaced = {"Popen": popen, "DEVNULL": subprocess.DEVNULL}
    replaced["TimeoutExpired"] = subprocess.TimeoutExpired
    monkeypatch.setattr("llmctl.runtime.ranks.processes.subprocess", SimpleNamespace(**replaced))
