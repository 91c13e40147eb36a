"""Messages between rank 0 and another rank over a Unix socket: JSON objects, a line each.

The socket also tells each side that the other has ended, however it did. Only processes of the same
user are spoken to.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from llmctl.errors import RankFailure

_MOST_BYTES = 1 << 16  # of a message


class Channel:
    """One end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    @property
    def peer(self) -> tuple[int, int]:
        """(process id, user id) of the other end, as the kernel knows them."""
        option = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", option)
        return pid, uid

    @property
    def has_message(self) -> bool:
        """Whether `receive` has a message without the socket."""
        return b"\n" in self._buffer

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """A message, and an open file with it. An end that has gone does not hear it."""
        data = json.dumps(message).encode() + b"\n"
        try:
            if descriptor is None:
                self.connection.sendall(data)
            else:
                socket.send_fds(self.connection, [data], [descriptor])
        except OSError:
            pass

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None once the other end has gone. Raises TimeoutError, and ValueError
        for what is no message."""
        message, descriptors = self.receive_file(timeout_s)
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def receive_file(
        self, timeout_s: float | None = None
    ) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message and the open files that came with it."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        descriptors: list[int] = []
        while not self.has_message:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            try:
                data, found, _, _ = socket.recv_fds(self.connection, 4096, 1)
            except ConnectionError:
                data, found = b"", []
            descriptors += found
            self._buffer += data
            if not data or len(self._buffer) > _MOST_BYTES:
                return None, descriptors
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("a message that is nested too deeply") from error
        if not isinstance(message, dict):
            raise ValueError(f"a message is an object; this one is {type(message).__name__}")
        return message, descriptors

    def close(self) -> None:
        """The other end hears it."""
        self.connection.close()


def listen(address: str, job: str, size: int) -> socket.socket:
    """A socket that other ranks connect to. Raises RankFailure where another process has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RankFailure(
            f"rank 0 cannot listen for the others: job {job!r} has a rank 0 already ({error})",
            fix="end the other run of this job, or start one job a run",
        ) from error
    listener.listen(size)
    return listener


def connect(
    address: str, timeout_s: float, is_orphan: Callable[[], bool] = lambda: False
) -> Channel | None:
    """A channel to rank 0, once it listens; None if it does not in time, or is_orphan()."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not is_orphan():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            time.sleep(0.02)
            continue
        channel = Channel(connection)
        if channel.peer[1] == os.getuid():
            return channel
        channel.close()
        return None
    return None
